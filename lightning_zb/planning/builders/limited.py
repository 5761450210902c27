"""Schedules that keep to any memory limit by list scheduling: zb, zb-1p, zb-2p, zb-v and the waves."""

from __future__ import annotations

from lightning_zb.planning.builders.greedy import best_list_schedule
from lightning_zb.planning.placement import cyclic, wave
from lightning_zb.planning.registry import ScheduleSpec, register, register_numbered


def _sequential(name: str, memory: str, own_budget: float | None = None) -> ScheduleSpec:
    return ScheduleSpec(
        name=name,
        placement=lambda num_devices, num_layers: cyclic(num_devices),
        build=best_list_schedule,
        assumption="any costs; first paper, section 3",
        memory=memory,
        own_budget=own_budget,
        default_budget=1.0,
    )


def _wave(chunks_per_device: int) -> ScheduleSpec:
    return ScheduleSpec(
        name=f"wave-{chunks_per_device}",
        placement=lambda num_devices, num_layers: wave(num_devices, chunks_per_device),
        build=best_list_schedule,
        assumption=f"{chunks_per_device} chunks per device that go down the devices and up again (Hanayo), any costs",
        memory="the given limit; P x M_B on every device by default",
        default_budget=1.0,
    )


register(_sequential("zb", "the given limit; P x M_B by default"))
register(_sequential("zb-1p", "P x M_B", own_budget=1.0))
register(_sequential("zb-2p", "2 P x M_B", own_budget=2.0))
register(
    ScheduleSpec(
        name="zb-v",
        placement=lambda num_devices, num_layers: wave(num_devices, 2),
        build=best_list_schedule,
        assumption="any costs, at its best where T_F = T_B = T_W; first paper, section 6",
        memory="the given limit; P x M_B on every device by default",
        default_budget=1.0,
    )
)
register_numbered("wave", _wave)
