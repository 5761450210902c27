"""Interleaved 1F1B (Narayanan et al., 2021): several chunks per device in cyclic placement, any number of microbatches."""

from __future__ import annotations

from lightning_zb.planning.placement import cyclic
from lightning_zb.planning.registry import Problem, ScheduleSpec, register, register_numbered
from lightning_zb.planning.schedule import Pass, PassKind, Schedule

_ASSUMPTION = "equal chunks; bubble of 1f1b over the chunks per device, paid with as many more transfers"


def _build(problem: Problem) -> Schedule:
    num_devices, m = problem.placement.num_devices, problem.num_microbatches
    chunks_per_device = problem.placement.num_chunks // num_devices
    if problem.placement != cyclic(num_devices, chunks_per_device):
        raise ValueError(
            f"'interleaved' needs its chunks on the devices 0, 1, ..., {num_devices - 1} in turn, "
            f"not {list(problem.placement.devices)}; for other placements use 'zb'"
        )
    return Schedule(tuple(_order(device, num_devices, chunks_per_device, m) for device in range(num_devices)))


def _order(device: int, num_devices: int, chunks_per_device: int, num_microbatches: int) -> tuple[Pass, ...]:
    """Microbatches advance in groups of one per device, each group through all chunks before the next.

    A last group that is not full is ordered as if it were; what it lacks is then left out, which keeps the order runnable.
    """
    levels = range(chunks_per_device)
    groups = [range(start, start + num_devices) for start in range(0, num_microbatches, num_devices)]

    def sequence(kind: PassKind, levels_in_turn: range) -> list[Pass]:
        return [Pass(kind, level * num_devices + device, j) for group in groups for level in levels_in_turn for j in group]

    forwards = sequence(PassKind.FORWARD, levels)
    backwards = sequence(PassKind.BACKWARD, levels[::-1])
    num_first = 2 * (num_devices - 1 - device) + (chunks_per_device - 1) * num_devices
    order = forwards[:num_first]
    for k, backward in enumerate(backwards):
        order += [*forwards[num_first + k : num_first + k + 1], backward]
    return tuple(p for p in order if p.microbatch < num_microbatches)


def _interleaved(name: str, chunks_per_device: int | None) -> ScheduleSpec:
    """The family member with that many chunks per device; None: as many as there are layers for."""
    return ScheduleSpec(
        name=name,
        placement=lambda num_devices, num_layers: cyclic(num_devices, chunks_per_device or max(1, num_layers // num_devices)),
        build=_build,
        assumption=_ASSUMPTION,
        memory="P x M_B (1 + (P-1) / (P x chunks per device)) on the first device",
        fixed_order=True,
    )


register(_interleaved("interleaved", 2))
register(_interleaved("interleaved-layers", None))
register_numbered("interleaved", lambda chunks_per_device: _interleaved("interleaved", chunks_per_device))
