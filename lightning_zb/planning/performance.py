"""The pipeline performance model of the second paper (its Algorithm 1), device by device."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zb.planning.budget import constant_bytes
from lightning_zb.planning.plan import Plan
from lightning_zb.planning.timeline import common_seconds, incoming, memory_peaks, overlapped_seconds, simulate


@dataclass(frozen=True, slots=True)
class DevicePerformance:
    """One device in a step; seconds and bytes. The paper's symbols in brackets.

    Args:
        runtime: from the start of its first pass to the end of its last [T_d].
        computation: of its passes.
        communication: of the runtime, with inputs on the way to it; `computation + communication` is [C_d].
        bubble: of the runtime, with neither a pass nor an input on the way [BubbleTime].
        overlap: seconds in which inputs are on the way while it works [OverlapTime].
        activation_bytes: peak of what its passes hold [A_d].
        gradient_bytes: of its parameters [G_d].
        constant_bytes: model states and workspace beside, gradients included where the costs know them [M_d before the last
            step of the algorithm].
    """

    runtime: float
    computation: float
    communication: float
    bubble: float
    overlap: float
    activation_bytes: float
    gradient_bytes: float
    constant_bytes: float


def device_performance(plan: Plan) -> tuple[DevicePerformance, ...]:
    """The figures of every device: T_d = C_d + BubbleTime - OverlapTime holds exactly.

    Args:
        plan: with its costs.
    """
    chunk_costs = plan.costs.chunks(plan.partition)
    arguments = (plan.placement, chunk_costs, plan.costs)
    timeline = simulate(plan.schedule, *arguments)
    overlaps = overlapped_seconds(timeline, *arguments)
    spans = zip(timeline.starts, timeline.ends, strict=True)
    communication = [
        common_seconds(arriving, [(min(starts), max(ends))])
        for arriving, (starts, ends) in zip(incoming(timeline, *arguments), spans, strict=True)
    ]
    peaks = memory_peaks(plan.schedule, plan.placement, chunk_costs)
    constants = constant_bytes(plan.costs, plan.partition, plan.placement)
    gradients = [sum(chunk_costs[c].parameter_bytes for c in plan.placement.chunks_of(d)) for d in range(plan.num_devices)]
    return tuple(
        DevicePerformance(
            runtime=runtime,
            computation=busy,
            communication=arriving,
            bubble=runtime - busy - arriving + overlap,
            overlap=overlap,
            activation_bytes=peak,
            gradient_bytes=gradient,
            constant_bytes=constant,
        )
        for runtime, busy, arriving, overlap, peak, gradient, constant in zip(
            timeline.spans, timeline.busy, communication, overlaps, peaks, gradients, constants, strict=True
        )
    )
