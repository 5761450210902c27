"""Checkpoints as a directory: every device writes and reads what it holds, and no process ever sees the whole model.

Tensors are stored by `torch.distributed.checkpoint` under the names of parameters, so any number of devices, any plan
and the plain Trainer (through `consolidate`) read them. What is small and equal everywhere (progress, callbacks,
schedulers, hyperparameters) is one file beside them, as Lightning's own strategies do it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

META_FILE = "meta.pt"
_INDEX_FILE = ".metadata"  # of torch.distributed.checkpoint, written last
_KEYS, _NAMES, _VALUES = "state_dict_keys", "optimizer_parameter_names", "optimizer_values"


def is_sharded(path: str | Path) -> bool:
    """Whether a path is a checkpoint directory (complete or not)."""
    return Path(path).is_dir()


def save(
    checkpoint: dict[str, Any],
    path: Path,
    keys: Sequence[str],
    names: Sequence[Sequence[str]],
    gather: Callable[[Any], list[Any] | None],
    group: dist.ProcessGroup | None,
) -> None:
    """Write this process's part; the first process also writes what is equal everywhere (a collective).

    Args:
        checkpoint: as Lightning dumps it, with this process's part of `state_dict` and `optimizer_states`.
        path: the directory; one that exists is replaced.
        keys: all keys of the unsplit model's state dict, in order.
        names: for each optimizer the parameters' names in the order of its indices.
        gather: collects one object from every process on the first.
        group: of all processes that hold parts; None in one process.
    """
    rest = dict(checkpoint)
    tensors = {f"state_dict/{key}": value for key, value in rest.pop("state_dict").items() if isinstance(value, Tensor)}
    values: dict[str, Any] = {}  # None where a tensor is stored beside the others; keeps their order
    groups = []
    for i, optimizer in enumerate(rest.pop("optimizer_states", [])):
        groups.append(optimizer["param_groups"])
        for index, entries in optimizer["state"].items():
            for name, value in entries.items():
                key = f"optimizer/{i}/{names[i][index]}/{name}"
                values[key] = value
                if isinstance(value, Tensor):
                    tensors[key], values[key] = value, None
    parts = gather(values)
    if parts is not None:
        path.mkdir(parents=True, exist_ok=True)
        (path / _INDEX_FILE).unlink(missing_ok=True)  # until the new one is written the directory counts as incomplete
        merged = {key: value for part in parts for key, value in part.items()}
        rest.update({"optimizer_states": groups, _KEYS: list(keys), _NAMES: [list(n) for n in names], _VALUES: merged})
        torch.save(rest, path / META_FILE)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled, unavailable or uninitialized.*")
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path), process_group=group)


def load(
    path: Path,
    held_keys: Sequence[str],
    held_parameters: Sequence[Sequence[str]],
    group: dist.ProcessGroup | None,
    weights_only: bool | None = None,
) -> tuple[dict[str, Any], set[str]]:
    """Read this process's part (a collective).

    Args:
        path: the directory.
        held_keys: keys of the module's state dict that this process holds.
        held_parameters: for each optimizer the names of all its parameters in the order of its indices, "" for those
            of other processes.
        group: of all processes that read; None in one process.
        weights_only: refuse anything but tensors and plain values; None for torch's default.

    Returns:
        The checkpoint as Lightning dumped it, with this process's part of `state_dict` and `optimizer_states`, and all
        keys of the state dict that the directory has.

    Raises:
        ValueError: the directory is not a complete checkpoint.
    """
    rest = _read_meta(path, weights_only)
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    groups, keys, _, values = (rest.pop(name) for name in ("optimizer_states", _KEYS, _NAMES, _VALUES))
    where = {name: (i, index) for i, names in enumerate(held_parameters) for index, name in enumerate(names) if name}
    wanted = {f"state_dict/{key}" for key in held_keys} & set(stored)
    wanted |= {key for key in stored if key.startswith("optimizer/") and key.split("/")[2] in where}
    tensors = {key: _empty(stored[key]) for key in wanted}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled, unavailable or uninitialized.*")
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), process_group=group)
    states: list[dict[int, dict[str, Any]]] = [{} for _ in groups]
    for key, value in values.items():
        _, _, parameter, name = key.split("/")
        if parameter in where:
            i, index = where[parameter]
            states[i].setdefault(index, {})[name] = tensors.get(key, value)
    rest["state_dict"] = {key: tensors[f"state_dict/{key}"] for key in held_keys if f"state_dict/{key}" in tensors}
    if groups:
        rest["optimizer_states"] = [_joined(state, group_) for state, group_ in zip(states, groups, strict=True)]
    return rest, set(keys)


def consolidate(path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
    """The checkpoint that the plain Trainer would have written; holds the whole model in memory.

    Args:
        path: a checkpoint directory.
        weights_only: refuse anything but tensors and plain values; None for torch's default.

    Returns:
        A checkpoint for `torch.save`, `Trainer.fit(ckpt_path=...)` and `LightningModule.load_from_checkpoint`.

    Raises:
        ValueError: the directory is not a complete checkpoint.
    """
    meta = _read_meta(Path(path), weights_only)
    return load(Path(path), meta[_KEYS], meta[_NAMES], None, weights_only)[0]


def _joined(state: dict[int, dict[str, Any]], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def _empty(stored: Any) -> Tensor:
    assert isinstance(stored, TensorStorageMetadata)
    return torch.empty(stored.size, dtype=stored.properties.dtype)


def _read_meta(path: Path, weights_only: bool | None) -> dict[str, Any]:
    missing = [name for name in (META_FILE, _INDEX_FILE) if not (path / name).is_file()]
    if missing:
        raise ValueError(
            f"{path} is not a complete checkpoint: it has no {missing[0]}; name a directory that "
            "ZeroBubbleStrategy(save_distributed_checkpoint=True) has written to its end"
        )
    options = {} if weights_only is None else {"weights_only": weights_only}
    return torch.load(path / META_FILE, map_location="cpu", **options)
