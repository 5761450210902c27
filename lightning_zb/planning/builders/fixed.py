"""Orders that are closed forms of placement and microbatches, whatever the costs: gpipe, 1f1b and the handcrafted ones.

Times and memory decide nothing here, so a memory budget can only be checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lightning_zb.planning.placement import Placement, cyclic
from lightning_zb.planning.registry import Problem, ScheduleSpec, register
from lightning_zb.planning.schedule import Pass, PassKind, Schedule

F, B, W, BW = PassKind.FORWARD, PassKind.BACKWARD_INPUT, PassKind.BACKWARD_WEIGHT, PassKind.BACKWARD


def one_forward_one_backward(num_forwards_first: int, num_delayed: int, stage: int, num_microbatches: int) -> Iterator[Pass]:
    """The order of one stage: some F, then one B and one F in turn, each W a fixed number of B later.

    Args:
        num_forwards_first: F before the first B, at least 1.
        num_delayed: B whose W is still due; 0 runs each W right after its B.
        stage: the chunk.
        num_microbatches: microbatches of the step.
    """
    m = num_microbatches
    num_forwards_first, num_delayed = min(num_forwards_first, m), min(num_delayed, m)
    yield from (Pass(F, stage, j) for j in range(num_forwards_first))
    for j in range(m):
        yield Pass(B, stage, j)
        if j >= num_delayed:
            yield Pass(W, stage, j - num_delayed)
        if j + num_forwards_first < m:
            yield Pass(F, stage, j + num_forwards_first)
    yield from (Pass(W, stage, j) for j in range(m - num_delayed, m))


def _stage_of_each_device(placement: Placement) -> tuple[int, ...]:
    if placement.num_chunks != placement.num_devices:
        raise ValueError(
            f"placement {list(placement.devices)} has {placement.num_chunks} chunks on {placement.num_devices} devices; "
            "this schedule runs one chunk on each device, 'interleaved', 'zb' and 'wave-N' run several"
        )
    return tuple(placement.chunks_of(device)[0] for device in range(placement.num_devices))


def _gpipe(problem: Problem) -> Schedule:
    microbatches = range(problem.num_microbatches)
    return Schedule(
        tuple(
            tuple([Pass(F, stage, j) for j in microbatches] + [Pass(BW, stage, j) for j in microbatches])
            for stage in _stage_of_each_device(problem.placement)
        )
    )


def _staged(
    num_forwards_first: Callable[[int], int], num_delayed: Callable[[int], int], fused: bool = False
) -> Callable[[Problem], Schedule]:
    """A builder from the two numbers of `one_forward_one_backward`, given how many stages lie below this one and above.

    Args:
        num_forwards_first: by the number of stages after this one.
        num_delayed: by the number of stages before this one.
        fused: write each B and its W as one BW.
    """

    def build(problem: Problem) -> Schedule:
        num_stages = problem.placement.num_chunks
        schedule = Schedule(
            tuple(
                tuple(
                    one_forward_one_backward(
                        num_forwards_first(num_stages - 1 - stage), num_delayed(stage), stage, problem.num_microbatches
                    )
                )
                for stage in _stage_of_each_device(problem.placement)
            )
        )
        return schedule.fused() if fused else schedule

    return build


register(
    ScheduleSpec(
        name="gpipe",
        placement=lambda num_devices, num_layers: cyclic(num_devices),
        build=_gpipe,
        assumption="all forwards, then all backwards; a baseline",
        memory="m x M_B on every stage",
        fixed_order=True,
    )
)
register(
    ScheduleSpec(
        name="1f1b",
        placement=lambda num_devices, num_layers: cyclic(num_devices),
        build=_staged(lambda after: after + 1, lambda before: 0, fused=True),
        assumption="equal stages; bubble (P-1)(T_F + T_B + T_W)",
        memory="P x M_B on the first stage, one less on each further one",
        fixed_order=True,
    )
)
register(
    ScheduleSpec(
        name="zb-h1",
        placement=lambda num_devices, num_layers: cyclic(num_devices),
        build=_staged(lambda after: after + 1, lambda before: before),
        assumption="T_F = T_B = T_W; bubble (P-1)(T_F + T_B - T_W), first paper, section 2.1",
        memory="P x M_B, as 1f1b",
        fixed_order=True,
    )
)
register(
    ScheduleSpec(
        name="zb-h2",
        placement=lambda num_devices, num_layers: cyclic(num_devices),
        build=_staged(lambda after: 2 * after + 1, lambda before: 2 * before),
        assumption="T_F = T_B = T_W; bubble (P-1)(T_F + T_B - 2 T_W), first paper, section 2.2",
        memory="(2P-1) x M_B",
        fixed_order=True,
    )
)
