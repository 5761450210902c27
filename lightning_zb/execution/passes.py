"""F, B and W of the chunks of one device: what lives between them and where gradients enter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zb.execution.payload import Packet, flatten, pack, unflatten
from lightning_zb.execution.program import Program
from lightning_zb.execution.protocols import ChunkRunner
from lightning_zb.execution.split_backward import DeferredWeights, accumulate


class _Entry:
    """Where a received tensor enters the chunk's graph, and its gradient leaves it.

    Not a leaf: AccumulateGrad would copy the gradient to the leaf's strides, and autocast would cache a leaf's cast and
    add the gradients of its uses in the low precision; the unsplit model does neither.
    """

    __slots__ = ("gradient", "tensor")

    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def enter(self, tensor: Tensor) -> Tensor:
        """The tensor as the chunk sees it."""
        self.tensor = tensor
        return _Enter.apply(torch.empty(0, requires_grad=True), self, tensor)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, entry: _Entry, tensor: Tensor) -> Tensor:
        ctx.entry = entry
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.entry.gradient = gradient
        return None, None, None


@dataclass(slots=True)
class _Live:
    """One chunk on one microbatch, from its F to its W.

    Args:
        received: where the gradients that go back to the chunk before arrive.
        roots: outputs that need a gradient.
        weights: the weight-gradient work F recorded; None where the backward runs whole.
        kept: gradients of shared parameters that B computed itself.
    """

    received: list[_Entry]
    roots: list[Tensor]
    weights: DeferredWeights | None
    kept: dict[nn.Parameter, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Passes:
    """Runs the passes of one device's chunks.

    Parameters shared by several of its chunks get the contributions of one microbatch in one engine call, later chunk
    first, as plain autograd would add them; until the last of those chunks has run its W they are held. Parameters that
    other devices' chunks use too are set aside for the end of the step (`lightning_zb.execution.tied`).

    Args:
        runner: runs a chunk forward.
    """

    runner: ChunkRunner
    profiled_weights: Callable[[int, int], DeferredWeights] | None = None
    """While profiling makes the record of an F's weight work, by chunk and microbatch; then every backward is split."""
    runs_whole: bool | None = None
    """While profiling whether each backward runs whole, at B, or split; None: as the program says."""
    tied_parts: dict[nn.Parameter, dict[tuple[int, int], Tensor]] = field(default_factory=dict)
    """Gradients of tied parameters by (microbatch, chunk), all of the step."""
    contributors: dict[nn.Parameter, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Which chunks have contributed to each shared parameter so far."""
    _program: Program | None = None
    _fused: frozenset[tuple[int, int]] = frozenset()
    _live: dict[tuple[int, int], _Live] = field(default_factory=dict)
    _shared: dict[nn.Parameter, tuple[int, ...]] = field(default_factory=dict)
    _tied: dict[nn.Parameter, tuple[int, ...]] = field(default_factory=dict)
    _held: dict[tuple[int, nn.Parameter], dict[int, Tensor]] = field(default_factory=dict)
    _reported: dict[tuple[int, nn.Parameter], set[int]] = field(default_factory=lambda: defaultdict(set))

    def begin(self, program: Program, device: int) -> None:
        """Start a step, dropping whatever a step that did not end has left."""
        self._program = program
        self._fused = program.fused[device]
        self._shared = self.runner.shared_parameters()
        self._tied = self.runner.tied_parameters()
        self.tied_parts = {p: {} for p in self._tied}
        self._live.clear()
        self._held.clear()
        self._reported.clear()

    @property
    def num_live(self) -> int:
        """Chunk and microbatch pairs whose W has not run yet."""
        return len(self._live)

    def forward(self, chunk: int, microbatch: int, packet: Packet | None) -> tuple[Packet | None, Any]:
        """Run F.

        Args:
            chunk: the chunk.
            microbatch: the microbatch.
            packet: what chunk - 1 handed over; None for chunk 0.

        Returns:
            The packet for chunk + 1 and None; on the last chunk None and the detached loss (the plain output in a
            forward-only program).
        """
        assert self._program is not None
        training = not self._program.forward_only
        last = chunk == self._program.placement.num_chunks - 1
        received: Any = None
        leaves: list[_Entry] = []
        if packet is not None:
            if training:
                needed = [how.requires_grad for how in packet.layout.tensors]
                entries = [_Entry() if need else None for need in needed]
                entered = [t if e is None else e.enter(t) for e, t in zip(entries, packet.tensors, strict=True)]
                received = unflatten(packet.layout, entered)
                leaves = [e for e in entries if e is not None]
            else:
                received = unflatten(packet.layout, packet.tensors)
        if not training or self._is_whole(chunk, microbatch):
            weights = None
            output = self.runner.forward(chunk, microbatch, received)
        else:
            weights = DeferredWeights() if self.profiled_weights is None else self.profiled_weights(chunk, microbatch)
            with weights.recording():
                output = self.runner.forward(chunk, microbatch, received)
        if last:
            if not training:
                return None, output
            self._live[chunk, microbatch] = _Live(leaves, [output] if output.requires_grad else [], weights)
            return None, output.detach()
        if not training:
            return pack(output), None
        layout, tensors = flatten(output)
        self._live[chunk, microbatch] = _Live(leaves, [t for t in tensors if t.requires_grad], weights)
        return Packet(layout, tuple(t.detach() for t in tensors)), None

    def backward(self, chunk: int, microbatch: int, packet: Packet | None) -> Packet | None:
        """Run B: gradients of what the chunk received; weights are left to W.

        Args:
            chunk: the chunk.
            microbatch: the microbatch.
            packet: the gradients of its outputs; None on the last chunk.

        Returns:
            The gradients for chunk - 1; None on chunk 0.
        """
        live = self._live[chunk, microbatch]
        roots: list[Tensor] = live.roots
        gradients: list[Tensor] | None = None
        if packet is not None:
            sent, present = unflatten(packet.layout, packet.tensors)
            pairs = [(r, g) for r, g, there in zip(roots, sent, present or [True] * len(sent), strict=True) if there]
            roots, gradients = [r for r, _ in pairs], [g for _, g in pairs]
        recording = nullcontext() if live.weights is None else live.weights.recording()  # checkpointed layers recompute
        with self._setting_aside(self._shared_in(chunk), live.kept), recording:
            if roots:
                torch.autograd.backward(roots, gradients)
        outgoing = _pack_gradients(live.received) if chunk > 0 else None
        live.received, live.roots = [], []
        return outgoing

    @torch.no_grad()  # as in any backward: a gradient with a graph would keep activations alive
    def weight(self, chunk: int, microbatch: int) -> None:
        """Run W: gradients of the chunk's parameters enter `.grad` in one engine call."""
        live = self._live.pop((chunk, microbatch))
        contributions = {} if live.weights is None else dict(live.weights.contributions())
        for parameter in self._shared_in(chunk):
            part = _add(live.kept.get(parameter), contributions.pop(parameter, None))
            if parameter in self._tied:
                if part is not None:
                    self.tied_parts[parameter][microbatch, chunk] = part
                continue
            whole = self._join(parameter, chunk, microbatch, part)
            if whole is not None:
                contributions[parameter] = whole
        if contributions:
            accumulate(contributions)

    def is_split(self, chunk: int, microbatch: int) -> bool:
        """Whether W has work of its own to do."""
        return self._live[chunk, microbatch].weights is not None

    def _is_whole(self, chunk: int, microbatch: int) -> bool:
        whole = (chunk, microbatch) in self._fused if self.runs_whole is None else self.runs_whole
        return whole and not self._shared_in(chunk) and self.profiled_weights is None

    def _shared_in(self, chunk: int) -> list[nn.Parameter]:
        return [p for shared in (self._shared, self._tied) for p, chunks in shared.items() if chunk in chunks]

    def _join(self, parameter: nn.Parameter, chunk: int, microbatch: int, part: Tensor | None) -> Tensor | None:
        """Hold a chunk's part of a shared parameter; the sum, later chunks first, once every chunk has reported."""
        key = microbatch, parameter
        self._reported[key].add(chunk)
        if part is not None:
            self.contributors[parameter].add(chunk)
            self._held.setdefault(key, {})[chunk] = part
        if self._reported[key] != set(self._shared[parameter]):
            return None
        del self._reported[key]
        parts = self._held.pop(key, {})
        total: Tensor | None = None
        for later in sorted(parts, reverse=True):
            total = _add(total, parts[later])
        return total

    @contextmanager
    def _setting_aside(self, parameters: Sequence[nn.Parameter], kept: dict[nn.Parameter, Tensor]) -> Iterator[None]:
        """Keep what B adds to these parameters out of `.grad`, for W to enter."""
        before = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        yield
        for parameter, gradient in zip(parameters, before, strict=True):
            if parameter.grad is not None:
                kept[parameter] = parameter.grad
            parameter.grad = gradient


def _pack_gradients(received: list[_Entry]) -> Packet:
    """Gradients of what was received; where several can be missing, a mask says which are (zeros would not be the same)."""
    gradients = [torch.zeros_like(e.tensor) if e.gradient is None else e.gradient for e in received]
    present = [e.gradient is not None for e in received] if len(received) > 1 else None
    return pack((gradients, present))


def _add(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second
