"""Which end of the pipeline uses what lies outside the layers, where the first and the last chunk are on two devices.

Module structure does not tell: an embedding may be registered after the layers and a head before them. So both ends
keep everything outside the layers through the first step; a parameter belongs to the end that got a gradient for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from lightning_zb.model.layers import LayerStack
from lightning_zb.model.ownership import Ownership, outside_parameters, release
from lightning_zb.model.stubs import PrologueStubs


@dataclass(frozen=True, slots=True)
class EndReport:
    """What one end saw in the first step.

    Args:
        used: for each trainable parameter outside the layers whether it has a gradient here.
        stood_in: modules that a stand-in was returned for, on the last chunk's device those of the prologue.
    """

    used: tuple[bool, ...]
    stood_in: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SettledEnds:
    """Who holds what after the first step.

    Args:
        ownership: what this device holds now.
        shared: names of parameters that both ends use; their gradients must be added across the two, every step.
    """

    ownership: Ownership
    shared: tuple[str, ...]


def settle_ends(
    module: nn.Module,
    stack: LayerStack,
    ownership: Ownership,
    stubs: PrologueStubs,
    optimizers: Sequence[Optimizer],
    *,
    is_first_end: bool,
    exchange: Callable[[EndReport], tuple[EndReport, EndReport]],
) -> SettledEnds:
    """Free on each end what only the other uses; called on both after the first backward, before the optimizer steps.

    Args:
        module: the LightningModule.
        stack: its layers.
        ownership: what this device holds.
        stubs: of this device.
        optimizers: whose parameter groups name the parameters.
        is_first_end: whether this device has the first chunk, else the last.
        exchange: sends this end's report and returns those of the first and of the last end.

    Returns:
        What this device holds, and what both ends use. Parameters that neither used stay on both.
    """
    names = [name for name, p in outside_parameters(module, stack) if p.requires_grad]
    used = tuple(p.grad is not None for _, p in outside_parameters(module, stack) if p.requires_grad)
    first, last = exchange(EndReport(used, tuple(stubs.stood_in())))
    by_first_only, by_last_only, shared = split_by_use(names, first.used, last.used)
    prologue = {b for b in ownership.buffers if any(b.startswith(f"{name}.") for name in last.stood_in)}
    inside = {f"{layer}." for layer in stack.names}
    outside = {b for b in ownership.buffers if not any(b.startswith(layer) for layer in inside)}
    freed, buffers = (by_last_only, outside - prologue) if is_first_end else (by_first_only, prologue)
    return SettledEnds(release(module, stack, ownership, freed, buffers, optimizers), tuple(shared))


def split_by_use(
    names: Sequence[str], used_first: Sequence[bool], used_last: Sequence[bool]
) -> tuple[list[str], list[str], list[str]]:
    """Names that only the first end uses, that only the last end uses, that both use.

    Args:
        names: parameters.
        used_first: for each whether the first end has a gradient.
        used_last: the same for the last end.
    """
    pairs = list(zip(names, used_first, used_last, strict=True))
    return (
        [name for name, first, last in pairs if first and not last],
        [name for name, first, last in pairs if last and not first],
        [name for name, first, last in pairs if first and last],
    )
