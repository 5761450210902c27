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


def greedy(placement: Placement, num_microbatches: int, limit: int | None = None) -> Schedule:
    """A plain list schedule in unit time for any placement: B first, then F of later chunks while few are live, then W."""
    num_chunks = placement.num_chunks
    limit = 2 * placement.num_devices if limit is None else limit
    ends: dict[Pass, float] = {}
    following = {(kind, chunk): 0 for kind in (F, B, W) for chunk in range(num_chunks)}
    orders: list[list[Pass]] = [[] for _ in range(placement.num_devices)]
    live = [0] * placement.num_devices
    now = 0
    while sum(map(len, orders)) < 3 * num_chunks * num_microbatches:
        started = []
        for device in range(placement.num_devices):
            chunks = placement.chunks_of(device)

            def ready(kind: PassKind, chunk: int) -> bool:
                j = following[kind, chunk]
                if j == num_microbatches:
                    return False
                if kind is F:
                    before = [] if chunk == 0 else [Pass(F, chunk - 1, j)]
                elif kind is B:
                    before = [Pass(F, chunk, j)] + ([] if chunk == num_chunks - 1 else [Pass(B, chunk + 1, j)])
                else:
                    before = [Pass(B, chunk, j)]
                return all(ends.get(p, now + 1) <= now for p in before)

            choice = next(((B, c) for c in chunks if ready(B, c)), None)
            if choice is None:
                room = [c for c in reversed(chunks) if live[device] < limit - (c != chunks[-1])]
                choice = next(((F, c) for c in room if ready(F, c)), None)
            choice = choice or next(((W, c) for c in chunks if ready(W, c)), None)
            if choice is not None:
                started.append((device, Pass(*choice, following[choice])))
        for device, p in started:
            following[p.kind, p.chunk] += 1
            ends[p] = now + 1
            live[device] += {F: 1, B: -1, W: 0}[p.kind]
            orders[device].append(p)
        now += 1
        assert now < 100_000
    return Schedule(tuple(map(tuple, orders)))


def whole(schedule: Schedule) -> Schedule:
    """Each B as a BW, without W: what 1f1b and gpipe run."""
    return Schedule(
        tuple(
            tuple(Pass(BW, p.chunk, p.microbatch) if p.kind is B else p for p in order if p.kind is not W)
            for order in schedule.orders
        )
    )


class Block(nn.Module):
    """Norm, two linear layers with a nonlinearity, residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, blocks and a head, cut into chunks of one block each; optionally tied, with a side payload, frozen."""

    def __init__(self, num_chunks: int, tied: bool = False, nested: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.num_chunks, self.nested = num_chunks, nested
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(num_chunks))
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
    """Chunks that only take time: `seconds[kind]` for F, B and W, whatever the chunk; one number travels."""

    def __init__(self, seconds: dict[str, float], num_chunks: int, signature: Hashable = 0) -> None:
        self.seconds, self.num_chunks = seconds, num_chunks
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, chunk: int, microbatch: int, received: Any) -> Tensor:
        start = torch.zeros(4, requires_grad=True) if received is None else received
        out = _Sleep.apply(start, self.seconds["F"], self.seconds["B"])
        return out.sum() if chunk == self.num_chunks - 1 else out

    def signature(self, microbatch: int) -> Hashable:
        return 0

    def shared_parameters(self) -> dict[nn.Parameter, tuple[int, ...]]:
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
