"""Parameters that several chunks use: tied embedding and head, modules shared between layers, layers used twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_zb.model.layers import LayerStack
from lightning_zb.model.windows import Window
from lightning_zb.planning.placement import Placement


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter that several chunks use.

    Args:
        names: all its names in the module.
        chunks: the chunks that use it, in model order.
        devices: their devices, each once.
    """

    names: tuple[str, ...]
    chunks: tuple[int, ...]
    devices: tuple[int, ...]


def chunks_of_parameters(
    module: nn.Module, stack: LayerStack, windows: Sequence[Window]
) -> dict[nn.Parameter, tuple[int, ...]]:
    """The chunks that use each parameter, as far as module structure tells.

    A parameter outside the layers counts for the first chunk and, where it has several names there (a tied embedding
    and head) or belongs to a layer too, for the last chunk as well.

    Args:
        module: the LightningModule.
        stack: its layers.
        windows: of all chunks.
    """
    last = len(windows) - 1
    users: dict[nn.Parameter, set[int]] = {}
    for chunk, window in enumerate(windows):
        for layer in stack.modules[window.start : window.stop]:
            for p in layer.parameters():
                users.setdefault(p, set()).add(chunk)
    for p, names in _outside_names(module, stack).items():
        tied = len(names) > 1 or p in users
        users.setdefault(p, set()).update({0, last} if tied else {0})
    return {p: tuple(sorted(chunks)) for p, chunks in users.items()}


def parameters_of_chunks(
    module: nn.Module, stack: LayerStack, windows: Sequence[Window]
) -> dict[int, tuple[nn.Parameter, ...]]:
    """For each chunk the parameters that only layers of this chunk use: their gradients are complete with its last W.

    Args:
        module: the LightningModule.
        stack: its layers.
        windows: of all chunks.
    """
    outside = _outside_names(module, stack)
    found: dict[int, list[nn.Parameter]] = {}
    for p, chunks in chunks_of_parameters(module, stack, windows).items():
        if len(chunks) == 1 and p not in outside:
            found.setdefault(chunks[0], []).append(p)
    return {chunk: tuple(parameters) for chunk, parameters in found.items()}


def shared_parameters(
    module: nn.Module, stack: LayerStack, windows: Sequence[Window], own_chunks: Iterable[int]
) -> dict[nn.Parameter, tuple[int, ...]]:
    """Parameters used by several chunks of one device, with those chunks.

    Args:
        module: the LightningModule.
        stack: its layers.
        windows: of all chunks.
        own_chunks: the chunks of the device.
    """
    own = set(own_chunks)
    found = {}
    for p, chunks in chunks_of_parameters(module, stack, windows).items():
        here = tuple(c for c in chunks if c in own)
        if len(here) > 1:
            found[p] = here
    return found


def shared_across_devices(
    module: nn.Module, stack: LayerStack, windows: Sequence[Window], placement: Placement
) -> tuple[SharedParameter, ...]:
    """Parameters that chunks on different devices use; their gradients must be added across those devices.

    Call it before foreign parameters give up their memory or after: only identities count.

    Args:
        module: the LightningModule.
        stack: its layers.
        windows: of all chunks.
        placement: chunks to devices.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    found = []
    for p, chunks in chunks_of_parameters(module, stack, windows).items():
        devices = tuple(sorted({placement.devices[c] for c in chunks}))
        if len(devices) > 1:
            found.append(SharedParameter(tuple(names[p]), chunks, devices))
    return tuple(found)


def _outside_names(module: nn.Module, stack: LayerStack) -> dict[nn.Parameter, list[str]]:
    """Parameters used outside the layers, with their names there."""
    inside = {id(m) for layer in stack.modules for m in layer.modules()}
    found: dict[nn.Parameter, list[str]] = {}
    for prefix, m in module.named_modules():
        if id(m) not in inside:
            for name, p in m._parameters.items():
                if p is not None:
                    found.setdefault(p, []).append(f"{prefix}.{name}" if prefix else name)
    return found
