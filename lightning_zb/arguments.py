"""What `ZeroBubbleStrategy` may be given: a wrong argument is said at once, before any process starts or waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from numbers import Integral, Real
from os import PathLike
from typing import Any

from lightning_zb.planning.budget import check_budget
from lightning_zb.planning.layout_string import is_layout
from lightning_zb.planning.registry import find_schedule


@dataclass(frozen=True, slots=True)
class _Argument:
    """One argument.

    Args:
        accepts: whether a value is of the right kind.
        instead: what to write where it is not.
    """

    accepts: Callable[[Any], bool]
    instead: str


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuse arguments of the strategy that are of the wrong kind; what depends on model or processes is said later.

    Args:
        given: values by the names of the strategy's arguments; others may be among them.

    Raises:
        ValueError: one sentence with the argument, its value and what to write instead.
    """
    for name, argument in _ARGUMENTS.items():
        if not argument.accepts(given[name]):
            raise ValueError(f"{name}={given[name]!r} is not possible; write {argument.instead}")
    check_budget(given["memory_budget"], given["virtual_devices"])
    if not is_plan_file(given["schedule"]):
        find_schedule(given["schedule"])


def is_plan_file(schedule: str) -> bool:
    """Whether what stands for a schedule is the path of a plan file, not a name."""
    return schedule.endswith(".json")


def _is_count(value: Any, least: int = 1) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _is_list_of(value: Any, accepts: Callable[[Any], bool]) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(accepts, value))


def _is_cut(value: Any) -> bool:
    return is_layout(value) if isinstance(value, str) else _is_list_of(value, _is_count) and len(value) > 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_duration(value: Any) -> bool:
    if isinstance(value, timedelta):
        return value > timedelta(0)
    return _is_number(value) and 0 < value < timedelta.max.total_seconds()


def _is_budget(value: Any) -> bool:
    return isinstance(value, str) or _is_number(value)


def _one_of(*words: str | None) -> _Argument:
    *others, last = (f'"{word}"' if word else "None" for word in words)
    return _Argument(lambda value: isinstance(value, str | None) and value in words, f"{', '.join(others)} or {last}")


_SWITCH = _Argument(lambda value: isinstance(value, bool), "True or False")
_ARGUMENTS = {
    "schedule": _Argument(_is_text, 'the name of a schedule such as "zb-v", or the path of a plan file that ends with .json'),
    "memory_budget": _Argument(
        lambda value: value is None or _is_budget(value) or _is_list_of(value, _is_budget),
        'a multiple such as 1.5, a size such as "40GiB", or a list of these with one for each device',
    ),
    "layers": _Argument(
        lambda value: value is None or _is_text(value) or (_is_list_of(value, _is_text) and len(value) > 0),
        'the dotted path of the container that holds the layers, such as "model.layers", or a list of paths',
    ),
    "side_channels": _Argument(
        lambda value: isinstance(value, str) or _is_list_of(value, _is_text),
        'the dotted name of a list that layers append to, such as "model.aux_losses", or several names',
    ),
    "partition": _Argument(
        lambda value: value in (None, "even", "balanced") or _is_cut(value),
        '"even", "balanced", a layout such as "Et*3|t*4L", or how many layers each chunk has, at least one, such as [3, 4]',
    ),
    "constraints": _Argument(
        lambda value: value is None or (isinstance(value, Mapping) and set(value) <= {"together", "first", "alone"}),
        'lists of layers by what they must keep to, such as {"alone": ["epilogue"], "together": [["layers.0", "layers.1"]]}',
    ),
    "costs": _Argument(
        lambda value: value is None or _is_text(value) or isinstance(value, PathLike),
        'the path of a costs file, as "lightning-zb profile" writes it',
    ),
    "post_validation": _one_of("auto", "exact", "inplace", "off"),
    "error_if_nonfinite": _SWITCH,
    "save_distributed_checkpoint": _SWITCH,
    "virtual_devices": _Argument(
        lambda value: value is None or _is_count(value), "a number of devices to run in one process, 1 or more, or None"
    ),
    "start_method": _one_of("popen", "spawn", "fork", "forkserver"),
    "timeout": _Argument(_is_duration, "how many seconds a peer may be silent, more than 0, or a datetime.timedelta"),
    "process_group_backend": _one_of("nccl", "gloo", None),
    "data_parallel_size": _Argument(_is_count, "a number of replicas, 1 or more"),
    "shard_optimizer": _SWITCH,
    "data": _one_of("read", "broadcast"),
    "check_data_steps": _Argument(lambda value: _is_count(value, 0), "a number of steps, 0 for none"),
}
