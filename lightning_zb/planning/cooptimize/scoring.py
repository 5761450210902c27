"""What a layout is worth: its lower bound, and the step that a quick list schedule makes of it within memory.

Long steps repeat themselves in the middle, so a layout is judged by a step of fewer microbatches; those left out count
with the work of the busiest device. Everything is deterministic, and its effort is counted in passes placed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from lightning_zb.planning.bounds import Objective, bounds_of_orders
from lightning_zb.planning.budget import MemoryBudget, fits, limits_beside, most_by_device
from lightning_zb.planning.builders.greedy import Choices, list_order, smallest_limits
from lightning_zb.planning.cooptimize.layout import Layout
from lightning_zb.planning.cooptimize.plain_order import plain_schedule
from lightning_zb.planning.costs import ChunkCost, CostModel
from lightning_zb.planning.registry import Problem
from lightning_zb.planning.schedule import Schedule
from lightning_zb.planning.simulation import Floats, Integers, PassTable, reductions, run_step, tabulate

_ROUNDS = 3  # microbatches for each device of the step that layouts are judged by, so that warm-up and cool-down are whole

_FEW_PASSES = 2_000  # a step of no more is judged whole
_PASSES_PER_LOOK = 1_000  # that could be placed in the time in which a layout's chunks, limits and bounds are worked out

MANNERS = (
    Choices(0, patience=0.0, spare=1.0),
    Choices(0, patience=1.0, fill_forward=False, spare=1.0),
    Choices(2, patience=1.0, spare=1.0),
)
"""Ways of list scheduling to try: true times first, which were best on average over random heterogeneous layers."""


@dataclass(frozen=True, slots=True)
class Score:
    """What is known of a layout; seconds of a whole step.

    Args:
        layout: partition and placement.
        value: of the quick schedule.
        bound: no order is faster.
        work: of the busiest device.
        idle: of each device within `value`.
    """

    layout: Layout
    value: float
    bound: float
    work: float
    idle: tuple[float, ...]

    @property
    def estimate(self) -> float:
        """What a search for the order will make of it: seen to close three fifths of the gap between `value` and `bound`."""
        return self.bound + 0.8 * (self.value - self.bound)


@dataclass(slots=True)
class Scorer:
    """Scores the layouts of one problem and remembers them.

    Args:
        costs: the layers, links and speeds.
        num_devices: P.
        num_microbatches: m.
        budget: memory, as in `make_plan`.
        objective: the period is judged by step_time.
        tunes_order: whether schedules may be fitted to the costs; otherwise all are the plain 1F1B order.
        passes: placed so far: the effort spent.
    """

    costs: CostModel
    num_devices: int
    num_microbatches: int
    budget: MemoryBudget
    objective: Objective = Objective.STEP_TIME
    tunes_order: bool = True
    passes: int = 0
    _known: dict[Layout, Score | None] = field(default_factory=dict)
    _chunks: dict[tuple[int, int], tuple[ChunkCost, float]] = field(default_factory=dict)

    def problem(self, layout: Layout, num_microbatches: int | None = None) -> Problem | None:
        """What is to be ordered; None where not even one microbatch at a time fits the memory."""
        chunks = [self._chunk(cut) for cut in pairwise(layout.cuts)]
        placement = layout.placement
        constant = list(most_by_device([room for _, room in chunks], placement))
        for (cost, _), device in zip(chunks, layout.devices, strict=True):
            constant[device] += cost.state_bytes
        transient = most_by_device([cost.transient_bytes for cost, _ in chunks], placement)
        limits = limits_beside(self.budget, self.costs, constant, transient)
        m = num_microbatches or self.num_microbatches
        problem = Problem(placement, tuple(cost for cost, _ in chunks), self.costs, m, limits)
        return problem if fits(smallest_limits(problem), limits) else None

    def _chunk(self, cut: tuple[int, int]) -> tuple[ChunkCost, float]:
        """What the items between two cuts cost together, and the largest workspace of one of their passes."""
        if cut not in self._chunks:
            self._chunks[cut] = self.costs.chunk(range(*cut)), self.costs.workspace_bytes(range(*cut))
        return self._chunks[cut]

    def score(self, layout: Layout, ceiling: float = np.inf) -> Score | None:
        """Score a layout; None where it does not fit or cannot be better than `ceiling`."""
        if layout in self._known:
            return self._known[layout]
        self.passes += _PASSES_PER_LOOK
        short = self._short_step(layout)
        problem = self.problem(layout, short)
        if problem is None:
            self._known[layout] = None
            return None
        per_microbatch = self._work(problem)
        if per_microbatch.max() * self.num_microbatches >= ceiling:
            return None
        arguments = (problem.placement, problem.chunk_costs, self.costs, self.num_microbatches, problem.limits, self.objective)
        bound = bounds_of_orders(*arguments)[0].seconds
        if bound >= ceiling:
            return None
        value = min(self._times(problem, self.num_microbatches - short, float(per_microbatch.max())))
        idle = value - per_microbatch * self.num_microbatches
        score = Score(layout, value, bound, float(per_microbatch.max()) * self.num_microbatches, tuple(idle.tolist()))
        self._known[layout] = score
        return score

    def best(self, count: int, of_a_placement: int = 4) -> list[Score]:
        """The layouts of least estimate, no more than some of each placement."""
        known = [score for score in self._known.values() if score is not None]
        taken: Counter[tuple[int, ...]] = Counter()
        best = []
        for score in sorted(known, key=lambda score: (score.estimate, score.bound)):
            taken[score.layout.devices] += 1
            if taken[score.layout.devices] <= of_a_placement:
                best.append(score)
        return best[:count]

    def _work(self, problem: Problem) -> np.ndarray:
        work = np.bincount(problem.placement.devices, [least_work(c) for c in problem.chunk_costs], minlength=self.num_devices)
        return work / np.array([self.costs.speed(d) for d in range(self.num_devices)])

    def _short_step(self, layout: Layout) -> int:
        """Microbatches of the step that a layout is judged by."""
        if 3 * len(layout.counts) * self.num_microbatches <= _FEW_PASSES:
            return self.num_microbatches
        return min(self.num_microbatches, max(12, _ROUNDS * self.num_devices))

    def _times(self, problem: Problem, left_out: int, period: float) -> list[float]:
        """The step with each manner.

        Args:
            problem: of a step of fewer microbatches.
            left_out: microbatches that it lacks; each counts as one in the middle of the step does.
            period: seconds that one takes at least.
        """
        table = tabulate(problem.placement, problem.chunk_costs, self.costs, problem.num_microbatches)
        times = []
        for order, offsets in self._orders(problem, table):
            start, end = run_step(table, order, offsets)
            seconds = self.span(table, order, start, end, offsets)
            if left_out:
                ends = np.zeros(4 * table.num_cells)
                ends[order] = end
                backward = ends[table.num_cells : table.num_cells + problem.num_microbatches]  # B of the first chunk
                backward = np.maximum(backward, ends[3 * table.num_cells :][: problem.num_microbatches])  # or its BW
                third = problem.num_microbatches // 3
                seconds += left_out * max(period, float(backward[2 * third] - backward[third]) / third)
            times.append(seconds)
        return times

    def _orders(self, problem: Problem, table: PassTable) -> Iterator[tuple[Integers, Integers]]:
        if not self.tunes_order:
            order, offsets = table.encode(plain_schedule(problem))
            self.passes += len(order)
            yield order, offsets
            return
        for manner in MANNERS:
            order, offsets = list_order(problem, manner, table)
            self.passes += len(order)
            yield order, offsets

    def span(self, table: PassTable, order: Integers, start: Floats, end: Floats, offsets: Integers) -> float:
        """The step_time of what `run_step` says, reductions included, or the makespan where that is minimised."""
        last = end[offsets[1:] - 1]
        for device, *_, finish in reductions(table, order, end):
            last[device] = max(last[device], finish)
        return float(last.max() if self.objective is Objective.MAKESPAN else (last - start[offsets[:-1]]).max())

    def quick_schedule(self, layout: Layout) -> tuple[float, Schedule]:
        """The best schedule of the manners for the whole step, and its seconds."""
        problem = self.problem(layout)
        assert problem is not None
        table = tabulate(problem.placement, problem.chunk_costs, self.costs, problem.num_microbatches)
        found = []
        for order, offsets in self._orders(problem, table):
            found.append((self.span(table, order, *run_step(table, order, offsets), offsets), order, offsets))
        value, order, offsets = min(found, key=lambda item: item[0])
        return value, table.decode(order, offsets)


def least_work(cost: ChunkCost) -> float:
    """Seconds of a microbatch's passes on a device of speed 1, the backward whole where that takes less."""
    return cost.forward + min(cost.backward_input + cost.backward_weight, cost.whole_backward)
