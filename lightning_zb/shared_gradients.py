"""Parameters that several chunks use, over the whole pipeline: who adds the gradients, who holds a copy.

Structure tells of ties by name. What lies outside the layers can also be used at both ends without a second name (a
head written as `x @ self.embedding.weight.T`), or only at an end that structure does not tell. Both are learnt in the
first training step: until then everything outside the layers counts as shared between first and last chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import lightning.pytorch as pl
import torch.distributed as dist
from torch import nn

from lightning_zb.assignment import Assignment
from lightning_zb.execution.channels import Channels
from lightning_zb.execution.executor import Executor
from lightning_zb.execution.tied import accumulate_parts, exchange_parts
from lightning_zb.model.ends import EndReport, settle_ends
from lightning_zb.model.layers import LayerStack
from lightning_zb.model.ownership import Ownership, outside_parameters
from lightning_zb.model.runner import StepRunner
from lightning_zb.model.sharing import shared_across_devices
from lightning_zb.model.stubs import PrologueStubs


class Sharing:
    """What this process shares between its chunks and with other devices.

    Args:
        module: the LightningModule, after foreign parameters gave up their memory.
        stack: its layers.
        assigned: which devices run what, and which of them this process stands for.
        runners: of its devices; they learn what is shared and tied.
    """

    def __init__(
        self, module: pl.LightningModule, stack: LayerStack, assigned: Assignment, runners: Sequence[StepRunner]
    ) -> None:
        placement, devices = assigned.placement, assigned.devices
        self._module, self._stack, self._placement = module, stack, placement
        self._devices, self._runners = devices, tuple(runners)
        self._ends = placement.devices[0], placement.devices[-1]
        self._has_learnt = placement.num_chunks == 1
        parameters = dict(module.named_parameters(remove_duplicate=False))
        self._tied: dict[nn.Parameter, tuple[int, ...]] = {}
        for shared in shared_across_devices(module, stack, assigned.windows, placement):
            if set(shared.devices) & set(devices):
                self._tied[parameters[shared.names[0]]] = shared.chunks
        self._is_one_process = set(self._ends) <= set(devices)
        last = placement.num_chunks - 1
        if not self._has_learnt and self._is_one_process:
            for _, p in outside_parameters(module, stack):
                if self._ends[0] != self._ends[1]:
                    self._tied.setdefault(p, (0, last))
                else:
                    runners[self._devices.index(self._ends[0])].shared.setdefault(p, (0, last))
        order = {p: i for i, p in enumerate(module.parameters())}  # one for all devices: they exchange in it
        self._tied = dict(sorted(self._tied.items(), key=lambda item: order[item[0]]))
        is_last_end_only = self._ends[1] in self._devices and not self._is_one_process
        outside = {p for _, p in outside_parameters(module, stack) if p not in self._tied}
        self._copies = outside if is_last_end_only else set()
        self._publish()

    def is_copy(self, parameter: nn.Parameter) -> bool:
        """Whether another device answers for this parameter: it reports its norm and its values."""
        if parameter in self._tied:
            return self._holders(parameter)[0] not in self._devices
        return parameter in self._copies

    @property
    def joins_ends(self) -> bool:
        """Whether both ends, on this process, use a parameter that has one name only, as known after the first step."""
        names = Counter(id(p) for _, p in self._module.named_parameters(remove_duplicate=False))
        last = self._placement.num_chunks - 1
        shared = [p for runner in self._runners for p, chunks in runner.shared.items() if {0, last} <= set(chunks)]
        return self._is_one_process and last > 0 and any(names[id(p)] == 1 for p in shared)

    def finish_step(
        self, executors: Sequence[Executor], channels: Channels | None, ownership: Ownership, stubs: PrologueStubs
    ) -> Ownership:
        """Complete the gradients of tied parameters; after the first step settle who holds what.

        Args:
            executors: of this process's devices, their step just run.
            channels: process groups; None where all devices are in this process.
            ownership: what this process holds.
            stubs: of this process.

        Returns:
            What this process holds from now on.
        """
        for p in self._tied:
            parts = {key: part for e in executors for key, part in e.passes.tied_parts.get(p, {}).items()}
            if channels is None:
                accumulate_parts(p, parts)
            else:
                exchange_parts(p, parts, self._holders(p), channels)
        if not self._has_learnt:
            self._has_learnt = True
            ownership = self._learn(executors, channels, ownership, stubs)
        return ownership

    def _holders(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Devices of a tied parameter; the lowest chunk's comes first and owns it."""
        return tuple(dict.fromkeys(self._placement.devices[c] for c in self._tied[parameter]))

    def _publish(self) -> None:
        for device, runner in zip(self._devices, self._runners, strict=True):
            chunks = set(self._placement.chunks_of(device))
            runner.tied = {p: users for p, users in self._tied.items() if chunks & set(users)}

    def _learn(
        self, executors: Sequence[Executor], channels: Channels | None, ownership: Ownership, stubs: PrologueStubs
    ) -> Ownership:
        if self._is_one_process:
            for executor, runner in zip(executors, self._runners, strict=True):
                seen = executor.passes.contributors
                runner.shared = {p: c for p, c in runner.shared.items() if len(seen.get(p, ())) != 1}
            users = {p: {c for e in executors for _, c in e.passes.tied_parts.get(p, {})} for p in self._tied}
            self._tied = {p: c for p, c in self._tied.items() if len(users[p]) != 1}
            self._publish()
            return ownership
        if channels is None or channels.device not in self._ends:
            return ownership
        self._copies = {p for p in self._copies if p.grad is None}  # what neither end uses stays on both
        settled = settle_ends(
            self._module, self._stack, ownership, stubs, self._module.trainer.optimizers,
            is_first_end=channels.device == self._ends[0], exchange=lambda mine: self._exchange(mine, channels),
        )  # fmt: skip
        names = {id(p): name for name, p in self._module.named_parameters()}
        unknown = set(settled.shared) - {names.get(id(p)) for p in self._tied}
        if unknown:
            raise RuntimeError(
                f"parameter {min(unknown)!r} is used before and after the layers on two devices without a second name; "
                "tie it by name (self.head.weight = self.embedding.weight) or use a schedule with a V placement such as zb-v"
            )
        return settled.ownership

    def _exchange(self, mine: EndReport, channels: Channels) -> tuple[EndReport, EndReport]:
        """Swap reports with the other end."""
        first, last = self._ends
        is_first = channels.device == first
        peer = channels.ranks[last if is_first else first]
        box = [None]
        if is_first:
            dist.send_object_list([mine], dst=peer, group=channels.control)
            dist.recv_object_list(box, src=peer, group=channels.control)
        else:
            dist.recv_object_list(box, src=peer, group=channels.control)
            dist.send_object_list([mine], dst=peer, group=channels.control)
        theirs: EndReport = box[0]  # type: ignore[assignment]
        return (mine, theirs) if is_first else (theirs, mine)
