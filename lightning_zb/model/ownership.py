"""Which parameters a device holds; those of other devices keep their names and places but no memory.

A foreign parameter goes to the meta device in place, one meta parameter for each original, so that ties, optimizer
indices and checkpoint keys are those of the unsplit model. A module that contains the layers cannot be stood in for;
its own raw parameters become zeros of one element, expanded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zb.model.layers import LayerStack
from lightning_zb.model.windows import Window


@dataclass(frozen=True, slots=True)
class Ownership:
    """The parameters and buffers of one device after the foreign ones gave up their memory.

    Args:
        parameters: all parameters of the module in the unsplit model's order, each once, with their first names.
        held: for each of them, whether its values are on this device.
        buffers: names of the buffers that this device updates: those of its layers and, where it runs the start or the
            end of the step, those outside the layers.
    """

    parameters: tuple[tuple[str, nn.Parameter], ...]
    held: tuple[bool, ...]
    buffers: frozenset[str]

    def own_parameters(self) -> list[nn.Parameter]:
        """The parameters whose values are here."""
        return [p for (_, p), held in zip(self.parameters, self.held, strict=True) if held]

    def own_names(self) -> list[str]:
        """Their names."""
        return [name for (name, _), held in zip(self.parameters, self.held, strict=True) if held]

    @property
    def own_bytes(self) -> int:
        """Bytes of the parameters whose values are here."""
        return sum(p.numel() * p.element_size() for p in self.own_parameters())

    @property
    def total_bytes(self) -> int:
        """Bytes of the unsplit model's parameters."""
        return sum(p.numel() * p.element_size() for _, p in self.parameters)


def outside_parameters(module: nn.Module, stack: LayerStack) -> list[tuple[str, nn.Parameter]]:
    """Parameters that no layer uses, in the module's order."""
    inside = {id(p) for layer in stack.modules for p in layer.parameters()}
    return [(name, p) for name, p in module.named_parameters() if id(p) not in inside]


def needed_parameters(module: nn.Module, stack: LayerStack, windows: Iterable[Window]) -> set[int]:
    """Ids of what a device with these chunks needs; the ends need all outside the layers until they know who uses what."""
    windows = tuple(windows)
    needed = {id(p) for w in windows for layer in stack.modules[w.start : w.stop] for p in layer.parameters()}
    if any(w.is_first or w.is_last for w in windows):
        needed.update(id(p) for _, p in outside_parameters(module, stack))
    return needed


def take_ownership(module: nn.Module, stack: LayerStack, windows: Iterable[Window]) -> Ownership:
    """Free what the chunks of this device do not use.

    Parameters outside the layers stay where the first or the last chunk is; where those are two devices both keep all
    of them until a step has shown which end uses which (`lightning_zb.model.ends.settle_ends`).

    Args:
        module: the LightningModule, before its optimizers are made.
        stack: its layers.
        windows: of this device's chunks.

    Returns:
        What stays.
    """
    windows = tuple(windows)
    inside = {id(m) for layer in stack.modules for m in layer.modules()}
    own_modules = {id(m) for w in windows for layer in stack.modules[w.start : w.stop] for m in layer.modules()}
    around = _around_layers(module, stack)
    keep = needed_parameters(module, stack, windows)
    memo: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # holds the originals too, so that ids stay unique
    for m in module.modules():
        for name, p in m._parameters.items():
            if p is None or id(p) in keep:
                continue
            if id(p) not in memo:
                memo[id(p)] = (p, _freed(p, expanded_zeros=id(p) in around))
            m._parameters[name] = memo[id(p)][1]
        if id(m) in inside and id(m) not in own_modules:
            for name, b in m._buffers.items():
                m._buffers[name] = None if b is None else b.to("meta")
    freed = {id(new) for _, new in memo.values()}
    parameters = tuple(module.named_parameters())
    return Ownership(parameters, tuple(id(p) not in freed for _, p in parameters), updated_buffers(module, stack, windows))


def updated_buffers(module: nn.Module, stack: LayerStack, windows: Iterable[Window]) -> frozenset[str]:
    """Names of the buffers that a device with these chunks updates; see `Ownership`."""
    windows = tuple(windows)
    own_modules = {id(m) for w in windows for layer in stack.modules[w.start : w.stop] for m in layer.modules()}
    inside = {id(m) for layer in stack.modules for m in layer.modules()}
    holds_outside = any(w.is_first or w.is_last for w in windows)
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, m in module.named_modules()
        for name in m._buffers
        if (id(m) in own_modules if id(m) in inside else holds_outside)
    )


def release(
    module: nn.Module,
    stack: LayerStack,
    ownership: Ownership,
    names: Iterable[str],
    buffers: Iterable[str] = (),
    optimizers: Sequence[Optimizer] = (),
) -> Ownership:
    """Free parameters that turned out to be used by another device only.

    Args:
        module: the LightningModule.
        stack: its layers.
        ownership: what this device holds.
        names: parameters to free.
        buffers: buffers that another device updates; they keep their values here.
        optimizers: whose parameter groups name the parameters; what a checkpoint gave them as state goes too.

    Returns:
        What stays.
    """
    released = set(names)
    around = _around_layers(module, stack)
    memo = {id(p): _freed(p, expanded_zeros=id(p) in around) for name, p in ownership.parameters if name in released}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) in memo:
                    optimizer.state.pop(p, None)
    replace_parameters(module, memo, optimizers)
    held = tuple(h and name not in released for (name, _), h in zip(ownership.parameters, ownership.held, strict=True))
    return Ownership(tuple(module.named_parameters()), held, ownership.buffers - set(buffers))


def replace_parameters(module: nn.Module, replacements: Mapping[int, nn.Parameter], optimizers: Iterable[Optimizer]) -> None:
    """Put parameters in the place of others, wherever modules and parameter groups name these.

    Args:
        module: the LightningModule.
        replacements: new parameters by the id of the one whose place they take.
        optimizers: their states are left alone.
    """
    for m in module.modules():
        for name, p in m._parameters.items():
            if p is not None and id(p) in replacements:
                m._parameters[name] = replacements[id(p)]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [replacements.get(id(p), p) for p in group["params"]]


def move_to(module: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers to a device, in place; those without memory stay without.

    Args:
        module: the LightningModule, after `take_ownership`.
        device: where its chunks run.
    """
    for m in module.modules():
        for p in m._parameters.values():
            if p is None or p.is_meta:
                continue
            expanded = p.untyped_storage().nbytes() < p.numel() * p.element_size()
            p.data = torch.zeros((), dtype=p.dtype, device=device).expand(p.shape) if expanded else p.data.to(device)
        for name, b in m._buffers.items():
            if b is not None and not b.is_meta:
                m._buffers[name] = b.to(device)


def _around_layers(module: nn.Module, stack: LayerStack) -> set[int]:
    """Ids of the raw parameters of modules that contain layers: a step reads them where its other modules are stood in for."""
    inside = {id(m) for layer in stack.modules for m in layer.modules()}
    around = (m for m in module.modules() if id(m) not in inside and any(id(child) in inside for child in m.modules()))
    return {id(p) for m in around for p in m._parameters.values() if p is not None}


def _freed(parameter: nn.Parameter, *, expanded_zeros: bool = False) -> nn.Parameter:
    values: Tensor
    if expanded_zeros:
        values = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
    else:
        values = parameter.detach().to("meta")
    freed = nn.Parameter(values, requires_grad=parameter.requires_grad)
    freed.__dict__.update(parameter.__dict__)  # marks such as `_no_weight_decay`
    return freed
