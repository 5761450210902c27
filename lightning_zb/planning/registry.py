"""The schedules by name: what each needs, assumes and holds in memory, and who builds it.

Two kinds share the one registry: a `ScheduleSpec` orders the passes of a placement that its name determines, a
`SearchSpec` (such as `auto`) chooses partition, placement and order itself.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from lightning_zb.planning.costs import ChunkCost, CostModel
from lightning_zb.planning.placement import Placement
from lightning_zb.planning.plan import Plan
from lightning_zb.planning.schedule import Schedule

# imported on the first look-up; importing one registers its schedules
_FAMILIES = (
    "lightning_zb.planning.builders.fixed",
    "lightning_zb.planning.builders.interleaved",
    "lightning_zb.planning.builders.limited",
    "lightning_zb.planning.builders.waves",
    "lightning_zb.planning.builders.blocks",
    "lightning_zb.planning.cooptimize.auto_schedule",
)


@dataclass(frozen=True, slots=True)
class Problem:
    """What a builder orders.

    Args:
        placement: chunks to devices.
        chunk_costs: one for each chunk, for a device of speed 1.
        costs: gives links and device speeds.
        num_microbatches: microbatches of a step, at least 1.
        limits: activation bytes that each device may hold; infinite where there is no limit.
    """

    placement: Placement
    chunk_costs: tuple[ChunkCost, ...]
    costs: CostModel
    num_microbatches: int
    limits: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """One way to order passes.

    Args:
        name: what users write.
        placement: the placement for a number of devices and of stacked layers.
        build: the order for a problem of that placement.
        assumption: under which the schedule is at its best.
        memory: what it holds, in words.
        fixed_order: the order depends on the placement and the number of microbatches alone, so that a memory budget can
            only be checked; otherwise the builder keeps to the limits it is given.
        own_budget: the budget that is part of the definition; another one is an error.
        default_budget: the budget where none is given; None: what the devices have.
    """

    name: str
    placement: Callable[[int, int], Placement]
    build: Callable[[Problem], Schedule]
    assumption: str
    memory: str
    fixed_order: bool = False
    own_budget: float | None = None
    default_budget: float | None = None


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """What `make_plan` was asked for, handed to a `SearchSpec` as it stands; see `make_plan` for the fields."""

    costs: CostModel
    num_devices: int
    num_microbatches: int
    memory_budget: object = None
    partition: object = None
    placement: Placement | None = None
    options: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SearchSpec:
    """A planner that chooses the placement too.

    Args:
        name: what users write.
        plan: makes the whole plan; raises `InfeasibleBudget` where nothing fits.
        assumption: under which it is at its best.
        memory: what it holds, in words.
        default_effort: what its option `effort` is where it is not given.
    """

    own_budget: ClassVar[None] = None
    fixed_order: ClassVar[bool] = False

    name: str
    plan: Callable[[SearchRequest], Plan]
    assumption: str
    memory: str
    default_effort: int = 1


_specs: dict[str, ScheduleSpec | SearchSpec] = {}
_numbered: dict[str, Callable[[int], ScheduleSpec]] = {}


def register(spec: ScheduleSpec | SearchSpec) -> None:
    """Make a schedule known by its name."""
    _specs[spec.name] = spec


def register_numbered(name: str, make: Callable[[int], ScheduleSpec]) -> None:
    """Make a family known whose members are written `name-2`, `name-3`, ...: chunks per device."""
    _numbered[name] = make


def known_schedules() -> list[str]:
    """All names, numbered families as `name-N`."""
    _load()
    return sorted(_specs) + [f"{name}-N" for name in sorted(_numbered)]


def find_schedule(name: str, also: Iterable[str] = ()) -> ScheduleSpec | SearchSpec:
    """The schedule of that name.

    Args:
        name: what users write.
        also: names that the caller knows besides, for the message.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.
    """
    _load()
    if name in _specs:
        return _specs[name]
    match = re.fullmatch(r"(.+)-([1-9]\d*)", name)
    if match and match[1] in _numbered:
        return replace(_numbered[match[1]](int(match[2])), name=name)
    raise ValueError(f"schedule {name!r} is unknown; known are {', '.join([*known_schedules(), *also])}")


def _load() -> None:
    for module in _FAMILIES:
        importlib.import_module(module)
