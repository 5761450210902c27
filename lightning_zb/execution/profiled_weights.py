"""The record of deferred weight work, with what each item of the model takes in W and holds until then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_zb.execution.deferred_ops import CastParameter, Target, WeightWork
from lightning_zb.execution.live_bytes import Held, LiveBytes, storage_key
from lightning_zb.execution.profiler import StepRecorder
from lightning_zb.execution.split_backward import DeferredWeights


class _Timed:
    """An operator's weight work that notes its times, and holds what counts as memory until it is done."""

    __slots__ = ("_compute", "_recorder", "held", "item")

    def __init__(self, compute: Callable[..., Sequence[Tensor | None]], item: int, recorder: StepRecorder, held: list[Held]):
        self._compute, self.item, self._recorder, self.held = compute, item, recorder, held

    def __call__(self, *arguments: Any) -> Sequence[Tensor | None]:
        clock = self._recorder.clock
        start = clock.mark()
        result = self._compute(*arguments)
        self._recorder.segment("W", self.item, start, clock.mark())
        self.held.clear()
        return result


class ProfiledWeights(DeferredWeights):
    """Records weight work by the item whose B is running.

    Args:
        recorder: takes times.
        running_item: the item whose B is running.
        note_deferred_parameters: told of each item's parameters with deferred work.
        note_whole: told of each item's operators with a parameter that stay whole in B, by name.
        meter: counts bytes; None in steps that take times.
    """

    def __init__(
        self,
        recorder: StepRecorder,
        running_item: Callable[[], int],
        note_deferred_parameters: Callable[[int, Sequence[nn.Parameter]], None],
        note_whole: Callable[[int, str], None],
        meter: LiveBytes | None,
    ) -> None:
        super().__init__()
        self._recorder, self._running_item, self._meter = recorder, running_item, meter
        self._note_deferred_parameters, self._note_whole = note_deferred_parameters, note_whole
        self.stashed: dict[int, int] = {}
        """Bytes held from B to W by item, known once W has begun."""

    def defer(self, work: WeightWork) -> None:
        item = self._running_item()
        self._note_deferred_parameters(item, [p for target in work.targets for p in self._parameters_of(target)])
        held = []
        if self._meter is not None:
            found = (self._meter.hold(t) for t in work.arguments if isinstance(t, Tensor))
            held = [h for h in found if h is not None]
        super().defer(work._replace(compute=_Timed(work.compute, item, self._recorder, held)))

    def note_kept(self, name: str) -> None:
        super().note_kept(name)
        self._note_whole(self._running_item(), name)

    def _parameters_of(self, target: Target | None) -> Sequence[nn.Parameter]:
        if target is None:
            return ()
        if isinstance(target, CastParameter):
            return (target.parameter,)
        return (target,) if isinstance(target, nn.Parameter) else self._derived[target].parameters

    def contributions(self) -> dict[nn.Parameter, Tensor]:
        if self._meter is not None:
            self.stashed = _stash_bytes(self._work)
        self._recorder.begin_weights()
        return super().contributions()


def _stash_bytes(work: Sequence[WeightWork]) -> dict[int, int]:
    """Bytes that the items' work holds, each storage counted for the first item that holds it."""
    result: dict[int, int] = {}
    seen: set[int] = set()
    for item in work:
        if not isinstance(item.compute, _Timed):
            continue  # a gradient that B computed itself; W only adds it
        for held in item.compute.held:
            key = storage_key(held.tensor)
            if key not in seen:
                seen.add(key)
                size = held.tensor.untyped_storage().nbytes()
                result[item.compute.item] = result.get(item.compute.item, 0) + size
    return result
