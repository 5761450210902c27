"""The schedules by name with the partitions that the co-optimizer knows: what its result must not be worse than."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_zb.planning.budget import fits
from lightning_zb.planning.cooptimize.layout import Layout
from lightning_zb.planning.cooptimize.scoring import Scorer
from lightning_zb.planning.fusing import fuse_backward
from lightning_zb.planning.placement import cyclic, wave
from lightning_zb.planning.registry import Problem, ScheduleSpec, find_schedule
from lightning_zb.planning.schedule import Schedule
from lightning_zb.planning.simulation import run_step, tabulate
from lightning_zb.planning.timeline import memory_peaks

_FIXED_SEQUENTIAL = ("1f1b", "zb-h1", "zb-h2", "gpipe")
_MOST_PASSES = 8_000
"""Of a step for which the schedules that try many list schedules are built; above, the search has to do without them."""


def names_for(layout: Layout, many: bool) -> tuple[str, ...]:
    """Schedules by name that run on the placement of a layout.

    Args:
        layout: its placement counts.
        many: whether those that try many orders are wanted too.
    """
    p, v = layout.num_devices, len(layout.devices) // layout.num_devices
    names: tuple[str, ...] = ()
    if layout.devices == cyclic(p, v).devices:
        names += (f"interleaved-{v}",) if v > 1 else (*_FIXED_SEQUENTIAL, *(("zb",) if many else ()))
    if v > 1 and many and layout.devices == wave(p, v).devices:
        names += (("zb-v", "v-half", "v-min") if v == 2 else (f"wave-{v}",)) + (f"wave-1f1b-{v}",)
    return names


def rivals(layouts: Sequence[Layout], scorer: Scorer, ceiling: float) -> Iterator[tuple[float, Layout, Schedule]]:
    """Schedules by name that are faster than `ceiling`, each faster than the one before.

    Args:
        layouts: which partitions and placements to look at.
        scorer: of the problem; its bounds rule most layouts out.
        ceiling: seconds.
    """
    for layout in layouts:
        score = scorer.score(layout)
        if score is None or score.bound >= ceiling:
            continue
        problem = scorer.problem(layout)
        assert problem is not None
        many = 3 * len(layout.counts) * scorer.num_microbatches <= _MOST_PASSES
        for name in names_for(layout, many):
            spec = find_schedule(name)
            assert isinstance(spec, ScheduleSpec)
            schedule = fuse_backward(spec.build(problem), problem.placement, problem.chunk_costs, problem.costs)
            if spec.fixed_order and not fits(memory_peaks(schedule, problem.placement, problem.chunk_costs), problem.limits):
                continue
            value = seconds(problem, schedule, scorer)
            if value < ceiling:
                ceiling = value
                yield value, layout, schedule


def seconds(problem: Problem, schedule: Schedule, scorer: Scorer) -> float:
    """The step_time of a schedule, or its makespan where that is what counts."""
    table = tabulate(problem.placement, problem.chunk_costs, problem.costs, problem.num_microbatches)
    order, offsets = table.encode(schedule)
    start, end = run_step(table, order, offsets)
    scorer.passes += len(order)
    return scorer.span(table, order, start, end, offsets)
