"""1F1B with whole backward passes on waves (Liu et al., Hanayo, SC 2023): the placement is adapted, the order is fixed.

The order is the best that the list scheduler finds at nominal costs (equal chunks, a backward of two forwards, no links), so
it depends on the placement and the number of microbatches alone, as that of 1f1b does.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_zb.planning.builders.limited import best_list_schedule
from lightning_zb.planning.costs import ChunkCost, CostModel
from lightning_zb.planning.placement import wave
from lightning_zb.planning.registry import Problem, ScheduleSpec, register, register_numbered
from lightning_zb.planning.schedule import Pass, PassKind, Schedule

_NOMINAL = ChunkCost(forward=1.0, backward_input=2.0, backward_weight=0.0, activation_bytes=1.0)


def _build(problem: Problem) -> Schedule:
    num_chunks, num_devices = problem.placement.num_chunks, problem.placement.num_devices
    nominal = replace(
        problem,
        chunk_costs=(_NOMINAL,) * num_chunks,
        costs=CostModel(()),
        limits=(float(num_chunks),) * num_devices,  # the activations of the whole model for one microbatch
    )
    return _whole_backward(best_list_schedule(nominal))


def _whole_backward(schedule: Schedule) -> Schedule:
    """Each B with its W as one BW, wherever the W stood."""
    return Schedule(
        tuple(
            tuple(replace(p, kind=PassKind.BACKWARD) if p.kind is PassKind.BACKWARD_INPUT else p for p in order if _is_kept(p))
            for order in schedule.orders
        )
    )


def _is_kept(p: Pass) -> bool:
    return p.kind is not PassKind.BACKWARD_WEIGHT


def _wave_1f1b(name: str, chunks_per_device: int) -> ScheduleSpec:
    return ScheduleSpec(
        name=name,
        placement=lambda num_devices, num_layers: wave(num_devices, chunks_per_device),
        build=_build,
        assumption=f"equal chunks, {chunks_per_device} per device down the devices and up again; backward passes stay whole",
        memory="at most P x M_B on every device",
        fixed_order=True,
    )


register(_wave_1f1b("wave-1f1b", 2))
register_numbered("wave-1f1b", lambda chunks_per_device: _wave_1f1b("wave-1f1b", chunks_per_device))
