"""The three phases of planning a pipeline, and which of them holds a layout back."""

from __future__ import annotations

from enum import Enum, unique


@unique
class Phase(str, Enum):
    """What the co-optimizer may change."""

    PARTITION = "partition"
    PLACEMENT = "placement"
    SCHEDULE = "schedule"


ALL_PHASES = frozenset(Phase)


def losses(value: float, bound: float, work: float, floor: float) -> dict[Phase, float]:
    """Seconds of a step that each phase costs, the largest first.

    What the busiest device works beyond the least it could is the partition's, what even the best order of this placement
    waits is the placement's, the rest the schedule's.

    Args:
        value: the step.
        bound: no order of this partition and placement is faster.
        work: of the busiest device.
        floor: seconds that the busiest device works at least, however layers are cut.
    """
    found = {
        Phase.PARTITION: work - floor,
        Phase.PLACEMENT: bound - work,
        Phase.SCHEDULE: value - bound,
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))
