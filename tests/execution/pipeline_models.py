"""Small chunked models and orders for the executor's tests."""

from __future__ import annotations

import copy
import time
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zb.planning.placement import Placement
from lightning_zb.planning.schedule import Pass, PassKind, Schedule

F, B, W, BW = PassKind.FORWARD, PassKind.BACKWARD_INPUT, PassKind.BACKWARD_WEIGHT, PassKind.BACKWARD


class _Lists:
    """State of a list schedule in unit time."""

    def __init__(self, placement: Placement, num_microbatches: int) -> None:
        self.placement, self.num_microbatches = placement, num_microbatches
        self.ends: dict[Pass, int] = {}
        self.following = {(kind, chunk): 0 for kind in (F, B, W) for chunk in range(placement.num_chunks)}
        self.orders: list[list[Pass]] = [[] for _ in range(placement.num_devices)]
        self.live = [0] * placement.num_devices

    def ready(self, kind: PassKind, chunk: int, now: int) -> bool:
        j = self.following[kind, chunk]
        if kind is F:
            before = [] if chunk == 0 else [Pass(F, chunk - 1, j)]
        elif kind is B:
            before = [Pass(F, chunk, j)] + ([] if chunk == self.placement.num_chunks - 1 else [Pass(B, chunk + 1, j)])
        else:
            before = [Pass(B, chunk, j)]
        return j < self.num_microbatches and all(self.ends.get(p, now + 1) <= now for p in before)

    def choose(self, device: int, limit: int, now: int) -> tuple[PassKind, int] | None:
        chunks = self.placement.chunks_of(device)
        forwards = [(F, c) for c in reversed(chunks) if self.live[device] < limit - (len(chunks) - 1 - chunks.index(c))]
        candidates = [(B, c) for c in chunks] + forwards + [(W, c) for c in chunks]
        return next((c for c in candidates if self.ready(*c, now)), None)

    def run(self, device: int, p: Pass, now: int) -> None:
        self.following[p.kind, p.chunk] += 1
        self.ends[p] = now + 1
        self.live[device] += {F: 1, B: -1, W: 0}[p.kind]
        self.orders[device].append(p)


def greedy(placement: Placement, num_microbatches: int, limit: int | None = None) -> Schedule:
    """A list schedule for any placement: B first, then F of later chunks while fewer than `limit` are live, then W."""
    lists = _Lists(placement, num_microbatches)
    limit = 2 * placement.num_chunks if limit is None else limit
    now = 0
    while sum(map(len, lists.orders)) < 3 * placement.num_chunks * num_microbatches:
        chosen = [(d, lists.choose(d, limit, now)) for d in range(placement.num_devices)]
        for device, choice in chosen:
            if choice is not None:
                lists.run(device, Pass(*choice, lists.following[choice]), now)
        now += 1
        assert now < 100_000
    return Schedule(tuple(map(tuple, lists.orders)))


def whole(schedule: Schedule) -> Schedule:
    """Each B as a BW, without W: what 1f1b and gpipe run."""
    return Schedule(
        tuple(
            tuple(Pass(BW, p.chunk, p.microbatch) if p.kind is B else p for p in order if p.kind is not W)
            for order in schedule.orders
        )
    )


class Block(nn.Module):
    """Norm, two linear layers with a nonlinearity, residual; a counting one counts its training calls and depends on them."""

    def __init__(self, width: int, counting: bool = False) -> None:
        super().__init__()
        self.counting = counting
        self.register_buffer("calls", torch.zeros(()))
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.counting and torch.is_grad_enabled():
            self.calls.add_(1)
        return x * (1 + self.calls / 1024) + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, blocks and a head, cut into chunks of one block each; optionally tied, with a side payload, frozen."""

    def __init__(
        self, num_chunks: int, tied: bool = False, nested: bool = False, frozen: bool = False, counting: bool = False
    ) -> None:
        super().__init__()
        self.num_chunks, self.nested = num_chunks, nested
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(8, counting) for _ in range(num_chunks))
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if frozen:
            self.embedding.requires_grad_(False)
            self.blocks[0].requires_grad_(False)

    def run_chunk(self, chunk: int, received: Any, ids: Tensor) -> Any:
        aside: list[Tensor] = []
        scale = 1
        if chunk == 0:
            x = self.embedding(ids)
        elif self.nested:
            x, aside, scale = received["x"], list(received["aside"]), received["scale"]
        else:
            x = received
        x = self.blocks[chunk](x)
        if self.nested:
            aside.append(x.mean(dim=-1).transpose(0, 1) * scale)
            if chunk < self.num_chunks - 1:
                return {"x": x, "aside": tuple(aside), "scale": scale + 1, "none": None, "ids": ids}
        elif chunk < self.num_chunks - 1:
            return x
        loss = nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return loss + sum(a.square().mean() for a in aside)


class Runner:
    """A `ChunkRunner` over a `Model` and token ids, one tensor a microbatch."""

    def __init__(self, model: Model, microbatches: list[Tensor], placement: Placement, device: int | None = None) -> None:
        self.model, self.microbatches = model, microbatches
        own = range(placement.num_chunks) if device is None else placement.chunks_of(device)
        self.shared: dict[nn.Parameter, tuple[int, ...]] = {}
        if model.head.weight is model.embedding.weight and len(own) > 1 and {0, placement.num_chunks - 1} <= set(own):
            self.shared[model.head.weight] = (0, placement.num_chunks - 1)

    def forward(self, chunk: int, microbatch: int, received: Any) -> Any:
        out = self.model.run_chunk(chunk, received, self.microbatches[microbatch])
        return out / len(self.microbatches) if chunk == self.model.num_chunks - 1 else out

    def signature(self, microbatch: int) -> Hashable:
        return tuple(self.microbatches[microbatch].shape)

    def shared_parameters(self) -> dict[nn.Parameter, tuple[int, ...]]:
        return self.shared

    def tied_parameters(self) -> dict[nn.Parameter, tuple[int, ...]]:
        return {}


def make_microbatches(count: int, uneven: bool = False, seed: int = 0) -> list[Tensor]:
    """Token ids; uneven ones differ in both dimensions."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2 + (j % 2) * uneven, 5 + (j % 3) * uneven) for j in range(count)]
    return [torch.randint(0, 11, shape, generator=generator) for shape in shapes]


def reference(model: Model, microbatches: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Losses and gradients of one process that accumulates the microbatches in order."""
    model = copy.deepcopy(model)
    losses = []
    for ids in microbatches:
        received = None
        for chunk in range(model.num_chunks):
            received = model.run_chunk(chunk, received, ids)
        loss = received / len(microbatches)
        loss.backward()
        losses.append(loss.detach())
    return losses, {name: p.grad for name, p in model.named_parameters()}


def differing(model: Model, expected: dict[str, Tensor | None], names: set[str] | None = None) -> list[str]:
    """Parameters whose gradient is not bit for bit the expected one."""
    wrong = []
    for name, parameter in model.named_parameters():
        if names is None or name in names:
            want, got = expected[name], parameter.grad
            if (want is None) != (got is None) or (want is not None and not torch.equal(want, got)):
                wrong.append(name)
    return wrong


class SleepingRunner:
    """Chunks that only take time.

    Args:
        seconds: of F, B and W of each chunk.
        num_chunks: chunks of the pipeline.
    """

    def __init__(self, seconds: dict[str, float], num_chunks: int) -> None:
        self.seconds, self.num_chunks = seconds, num_chunks
        self.weights = [nn.Parameter(torch.eye(4)) for _ in range(num_chunks)]
        for weight in self.weights:
            weight.register_hook(lambda _: time.sleep(self.seconds["W"]))  # fires once a W

    def forward(self, chunk: int, microbatch: int, received: Any) -> Tensor:
        start = torch.zeros(2, 4, requires_grad=True) if received is None else received
        out = _Sleep.apply(nn.functional.linear(start, self.weights[chunk]), self.seconds["F"], self.seconds["B"])
        return out.sum() if chunk == self.num_chunks - 1 else out

    def signature(self, microbatch: int) -> Hashable:
        return 0

    def shared_parameters(self) -> dict[nn.Parameter, tuple[int, ...]]:
        return {}

    def tied_parameters(self) -> dict[nn.Parameter, tuple[int, ...]]:
        return {}


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient.clone(), None, None
