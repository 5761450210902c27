"""A plan: partition, placement and schedule together with the costs they were made for and what they promise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, unique

from lightning_zb.planning.costs import CostModel
from lightning_zb.planning.placement import Partition, Placement
from lightning_zb.planning.schedule import Schedule


@unique
class PlanStatus(str, Enum):
    """How good a plan is known to be."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"

    @property
    def message(self) -> str:
        return {
            PlanStatus.OPTIMAL: "proved optimal for its partition and placement",
            PlanStatus.FEASIBLE: "within the memory limit; the lower bound says how far from optimal it can be",
            PlanStatus.INFEASIBLE: "no order of this partition and placement fits the memory limit",
        }[self]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the performance model expects of a plan. Seconds and bytes.

    Args:
        step_time: the largest span of a device, first pass to last; true when devices run out of step.
        makespan: end to end of one isolated step; true with a synchronous optimizer step.
        period: time per step when many follow each other, the validation edge included.
        lower_bound: no order of this partition and placement within this memory is faster than this step_time.
        bubble_rate: (step_time - work of its passes / sum of speeds) / step_time, the first paper's definition; a BW counts as
            what it takes, which may be less than B and W, so no order's bubble is negative.
        idle_fraction: idle / (P x step_time).
        peak_bytes: activation peak of each device.
        busy: seconds of work of each device.
    """

    step_time: float
    makespan: float
    period: float
    lower_bound: float
    bubble_rate: float
    idle_fraction: float
    peak_bytes: tuple[float, ...]
    busy: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PlannerInfo:
    """Who made the plan: the schedule's name, the seconds it took, how good it is known to be, and why it was chosen."""

    name: str
    seconds: float = 0.0
    status: PlanStatus = PlanStatus.FEASIBLE
    reason: str = ""
    options: dict[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """Partition, placement and schedule, the cost model they were made for, and the prediction.

    Args:
        costs: the layer costs used.
        partition: layers to chunks.
        placement: chunks to devices.
        schedule: the order of passes.
        predicted: what the performance model expects.
        planner: who made it.
        memory_limit: activation bytes of each device that the plan may use, or None.
    """

    costs: CostModel
    partition: Partition
    placement: Placement
    schedule: Schedule
    predicted: Prediction
    planner: PlannerInfo
    memory_limit: tuple[float, ...] | None = None

    @property
    def num_devices(self) -> int:
        return self.placement.num_devices

    @property
    def num_microbatches(self) -> int:
        return self.schedule.num_microbatches

    @property
    def ideal_seconds(self) -> float:
        """Step time of the plan's passes without any bubble."""
        return self.without_bubbles(self.predicted.busy)

    def without_bubbles(self, busy: Sequence[float]) -> float:
        """The step time that work would take if no device ever waited.

        Args:
            busy: seconds of work of each device.

        Returns:
            The work over the sum of device speeds, in seconds.
        """
        speeds = [self.costs.speed(d) for d in range(self.num_devices)]
        return sum(seconds * speed for seconds, speed in zip(busy, speeds, strict=True)) / sum(speeds)
