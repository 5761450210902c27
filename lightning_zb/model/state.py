"""Checkpoints of a module that is spread over devices: one file, key by key that of the unsplit model, and back.

Foreign parameters keep their places, so every device knows all keys and all optimizer indices; each contributes what it
holds, and the first device puts the parts in order. Collectives come in as a small `gather` argument.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zb.model.ownership import Ownership

Gather = Callable[[Any], "list[Any] | None"]
"""Collects one object from every device of the pipeline: a list in device order on the first, None elsewhere."""


def held_keys(module: nn.Module, ownership: Ownership) -> set[str]:
    """Keys of the module's state dict whose values are on this device.

    Args:
        module: the LightningModule.
        ownership: what this device holds.
    """
    held = {id(p) for p in ownership.own_parameters()}
    foreign = {name for name, p in module.named_parameters(remove_duplicate=False) if id(p) not in held}
    foreign.update(name for name, _ in module.named_buffers(remove_duplicate=False) if name not in ownership.buffers)
    return {key for key, value in module.state_dict().items() if key not in foreign and not _is_meta(value)}


def consolidated_state_dict(module: nn.Module, ownership: Ownership, gather: Gather) -> dict[str, Any]:
    """The unsplit model's state dict, same keys in the same order.

    Args:
        module: the LightningModule.
        ownership: what this device holds.
        gather: collects the parts.

    Returns:
        The state dict on the first device, with all tensors on the CPU; {} elsewhere.
    """
    held = held_keys(module, ownership)
    state = module.state_dict()
    parts = gather({key: _to_cpu(value) for key, value in state.items() if key in held})
    return {} if parts is None else merge_states(list(state), parts)


def merge_states(keys: Sequence[str], parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put the devices' parts in order; where several hold a key the first counts.

    Args:
        keys: all keys of the unsplit model, in order.
        parts: what each device holds.

    Raises:
        RuntimeError: no device holds a key.
    """
    merged = {}
    for key in keys:
        holder = next((part for part in parts if key in part), None)
        if holder is None:
            raise RuntimeError(f'no device holds "{key}" of the state dict, so the checkpoint would lack it')
        merged[key] = holder[key]
    return merged


def consolidated_optimizer_state(optimizer: Optimizer, gather: Gather) -> dict[str, Any]:
    """The unsplit model's optimizer state dict: the same indices, states in index order.

    Args:
        optimizer: this device's, over all parameters; foreign ones have no state.
        gather: collects the parts.

    Returns:
        The state dict on the first device, with all tensors on the CPU; {} elsewhere.
    """
    own = optimizer.state_dict()
    parts = gather({index: _to_cpu(state) for index, state in own["state"].items()})
    return {} if parts is None else {**own, "state": merge_optimizer_states(parts)}


def merge_optimizer_states(parts: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    """Per-parameter states of all devices by parameter index; where several have one the first counts."""
    merged: dict[Any, Any] = {}
    for part in parts:
        for index, state in part.items():
            merged.setdefault(index, state)
    return dict(sorted(merged.items(), key=lambda item: (not isinstance(item[0], int), item[0])))


def load_own_state(module: nn.Module, ownership: Ownership, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load this device's part of the unsplit model's state dict.

    Args:
        module: the LightningModule.
        ownership: what this device holds.
        state_dict: of the whole model.
        strict: whether every key must be known and present, those of other devices included.

    Raises:
        RuntimeError: keys are missing or unknown.
    """
    if strict:
        check_keys(module, state_dict)
    held = held_keys(module, ownership)
    module.load_state_dict({key: value for key, value in state_dict.items() if key in held}, strict=False)


def check_keys(module: nn.Module, present: Collection[str]) -> None:
    """Compare the keys of a checkpoint with those of the unsplit model.

    Raises:
        RuntimeError: keys are missing or unknown.
    """
    known = list(module.state_dict())
    missing = [key for key in known if key not in present]
    unexpected = sorted(set(present) - set(known))
    if missing or unexpected:
        raise RuntimeError(
            f"the checkpoint does not fit {type(module).__name__}: missing keys {missing}, unexpected keys {unexpected}; "
            "load it with strict=False to skip them"
        )


def own_optimizer_state(optimizer: Optimizer, kept: Iterable[nn.Parameter], state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """This process's part of the unsplit model's optimizer state dict, to give to `optimizer.load_state_dict`.

    Args:
        optimizer: over all parameters, in the unsplit model's order.
        kept: the parameters whose state is kept here.
        state_dict: of the whole model.
    """
    ids = {id(p) for p in kept}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = {index for index, p in enumerate(parameters) if id(p) not in ids}
    return {**state_dict, "state": {index: state for index, state in state_dict["state"].items() if index not in foreign}}


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _to_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: _to_cpu(item) for key, item in value.items()}
    return value
