"""Takes times and bytes of every layer while the passes of one device run one step.

F is timed in the layer's dispatcher. B is timed by gradient hooks on what layers return: a layer's hook fires when the
gradient of its output is complete, which is when its B starts. Deferred weight work belongs to the layer whose B
recorded it. Hooks only look: no value, no order of additions changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_zb.execution.live_bytes import LiveBytes, storage_key
from lightning_zb.execution.profiled_weights import ProfiledWeights
from lightning_zb.execution.profiler import Clock, Mark, StepRecorder
from lightning_zb.execution.workspace import Workspace
from lightning_zb.planning.placement import Partition
from lightning_zb.planning.schedule import Pass, PassKind


class LayerRecorder(StepRecorder):
    """Records one step of one device; items are numbered as in the partition (0 the prologue, then layers, the epilogue).

    Args:
        clock: notes moments.
        partition: items to chunks.
        meter: counts bytes; None to take times, which counting would falsify.
        workspace: measures what passes hold only while they run.
    """

    def __init__(
        self, clock: Clock, partition: Partition, meter: LiveBytes | None = None, workspace: Workspace | None = None
    ) -> None:
        super().__init__(clock)
        self._chunks = partition.chunks
        self._epilogue = partition.num_layers - 1
        self.meter, self.workspace = meter, workspace
        self.saved_bytes: dict[int, list[int]] = {}
        """For each item M_B, one entry a microbatch."""
        self.stashed_bytes: dict[int, list[int]] = {}
        """For each item M_W, one entry a microbatch."""
        self.transient_bytes: dict[int, int] = {}
        """For each item the most that its B held beyond what there was before and after it."""
        self.output_bytes: dict[int, int] = {}
        """For each item the bytes of what it returned."""
        self.users: dict[int, int] = {}
        """For each parameter's storage an item that uses it."""
        self.deferred: set[int] = set()
        """Storages of parameters whose gradients are computed in W."""
        self.whole: dict[int, set[str]] = {}
        """For each item the operators that take a parameter and stay whole in B."""
        self._hooked: set[int] = set()
        self._items: tuple[int, ...] = ()
        self._pass: Pass | None = None
        self._part: str | None = None
        self._item: int | None = None
        self._owner = 0
        self._since: Mark = None
        self._weights: dict[tuple[int, int], ProfiledWeights] = {}

    # -- passes ----------------------------------------------------------------------------------------------------

    def start(self, p: Pass) -> None:
        super().start(p)
        items = self._items = self._chunks[p.chunk]
        self._pass = p
        if self.workspace is not None:
            self.workspace.begin()
        if p.kind is PassKind.FORWARD:
            self._part, self._owner = "F", items[0]
            self._begin(0 if items[0] == 0 else None)
        elif p.kind.sends_gradient:
            self._part, self._owner = "B", items[-1]
            self._begin(None if items[-1] in self._hooked else items[-1])  # else when its gradient arrives

    def end(self, p: Pass) -> None:
        self._begin(None)
        self._part = None
        super().end(p)
        if self.workspace is not None:
            self.workspace.end((p.chunk, p.kind.value[-1]))
        if p.kind in (PassKind.BACKWARD_WEIGHT, PassKind.BACKWARD):
            weights = self._weights.pop((p.chunk, p.microbatch), None)
            if weights is not None and self.meter is not None:
                for item in self._chunks[p.chunk]:
                    self.stashed_bytes.setdefault(item, []).append(weights.stashed.get(item, 0))

    def begin_weights(self) -> None:
        self._begin(None)
        self._part = None
        super().begin_weights()
        if self.workspace is not None and self._pass is not None and self._pass.kind is PassKind.BACKWARD:
            self.workspace.end((self._pass.chunk, "B"))
            self.workspace.begin()

    def new_weights(self, chunk: int, microbatch: int) -> ProfiledWeights:
        """The record of weight work for an F."""
        weights = ProfiledWeights(self, self.running_item, self._note_deferred, self._note_whole, self.meter)
        self._weights[chunk, microbatch] = weights
        return weights

    def running_item(self) -> int:
        """The item whose code runs, or ran last."""
        return self._owner

    # -- layers ----------------------------------------------------------------------------------------------------

    @contextmanager
    def forward(self, chunk: int) -> Iterator[None]:
        """Around the user's step in F: count what autograd saves."""
        if self.meter is None:
            yield
            return
        saved: dict[int, int] = {}
        sizes = dict.fromkeys(self._chunks[chunk], 0)

        def note(key: int, size: int) -> None:
            if self.meter is not None and key in self.meter.ignored:
                self.users.setdefault(key, self._owner)
            elif key not in saved:
                saved[key] = size
                sizes[self._owner] += size

        with self.meter.hooks(note):
            yield
        for item, size in sizes.items():
            self.saved_bytes.setdefault(item, []).append(size)

    def enter_layer(self, position: int, arguments: Any) -> None:
        """A layer of the chunk starts its F.

        Args:
            position: the layer's place in the stack.
            arguments: what it is called with.
        """
        if self._part != "F":
            return
        if self._owner == 0:
            self._watch(0, arguments)
        self._owner = position + 1
        self._begin(position + 1)

    def enter_epilogue(self) -> None:
        """The code after the layers starts, in a chunk of nothing else."""
        if self._part == "F":
            self._begin(self._epilogue)

    def leave_layer(self, position: int, value: Any) -> None:
        """A layer of the chunk has returned.

        Args:
            position: the layer's place in the stack.
            value: what it returned.
        """
        if self._part != "F":
            return
        self._watch(position + 1, value)
        runs_on = position + 2 == self._epilogue == self._items[-1]
        self._begin(self._epilogue if runs_on else None)
        if runs_on:
            self._owner = self._epilogue

    def _watch(self, item: int, value: Any) -> None:
        """Note the output of an item, and the moment at which its gradient is complete."""
        tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
        self.output_bytes[item] = sum(t.numel() * t.element_size() for t in tensors)
        for t in tensors:
            if t.requires_grad:
                self._hooked.add(item)
                t.register_hook(partial(self._begin_backward, item))

    def _begin_backward(self, item: int, _gradient: Tensor) -> None:
        if self._part == "B" and (item < self._owner or self._item is None):
            self._owner = item
            self._begin(item)

    def _begin(self, item: int | None) -> None:
        """The running item gives way to another one, or to what belongs to none."""
        now = self.clock.mark()
        if self._item is not None and self._part is not None:
            self.segment(self._part, self._item, self._since, now)
            if self.meter is not None and self._part == "B":
                self.transient_bytes[self._item] = max(self.transient_bytes.get(self._item, 0), self.meter.rise)
        if self.meter is not None:
            self.meter.watch()
        self._item, self._since = item, now

    def _note_deferred(self, item: int, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            self.users.setdefault(storage_key(parameter), item)
            self.deferred.add(storage_key(parameter))

    def _note_whole(self, item: int, name: str) -> None:
        self.whole.setdefault(item, set()).add(name)


def observing(recorder: LayerRecorder | None, chunk: int) -> Any:
    """The context of F: the recorder's, where there is one."""
    return nullcontext() if recorder is None else recorder.forward(chunk)
