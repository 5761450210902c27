"""Memory-limited search: from a placement and costs to the best order that can be found.

Rounds of growing size alternate between tuning the list scheduler and annealing the best order. Which rounds there are
and what they do depends on the seed alone; effort only says how far to go. Hence a seed and an effort give the same plan
on any machine, and more effort never gives a worse one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_zb.planning.annealing import anneal, positive
from lightning_zb.planning.bounds import Bound, Objective, lower_bound
from lightning_zb.planning.costs import ChunkCost, CostModel
from lightning_zb.planning.instance import (
    Instance,
    build_instance,
    fits_memory,
    from_schedule,
    measure,
    minimum_memory,
    serial_order,
    to_schedule,
)
from lightning_zb.planning.leveller import Leveller
from lightning_zb.planning.placement import Placement
from lightning_zb.planning.plan import PlanStatus
from lightning_zb.planning.random_stream import new_stream
from lightning_zb.planning.schedule import Schedule
from lightning_zb.planning.simulation import tabulate
from lightning_zb.planning.stretching import stretched_lags
from lightning_zb.planning.timeline import steady_period
from lightning_zb.planning.tuned import starting_parameters
from lightning_zb.planning.tuning import CLOCK, NUM_CLOCKS, all_manners, clock_durations, default_parameters, manners, tune

DEFAULT_EFFORT = 14
"""Work units of a search: two rounds each of 1, 2 and 4 units. A unit is about 0.15 s on one core of 2024 for up to 6,000
passes, and grows with the number of passes to the power 0.6, to three times that; below 1,000 passes it shrinks likewise."""

_PASSES_PER_UNIT = 1_500_000  # passes that the list scheduler places
_LOOKS_PER_PASS = 0.6  # the annealer looks at that many passes in the time in which one is placed
_KEPT_VECTORS = 4
_PASSES_FOR_ALL_CLOCKS = 40_000  # beyond, each start is tried with its own clock alone
_MOST_PASSES_PER_UNIT = 3.2 * _PASSES_PER_UNIT
_NOT_FAR_BEHIND = 1.01  # of the best value: what is still worth annealing
_PLENTY = 1.1  # beyond that many times the activations of the whole model, transfers limit more than memory does
_EVALUATIONS_OF_A_START = 1500  # orders that one evolution by stretched transfers tries
_WARM, _COOL = 0.003, 0.0005  # first temperatures of an evolution, by the longest span and by the waits of all devices
_FIRST_STRETCHED = 6  # the round from which on transfers are stretched where memory is plenty: effort beyond the default


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found.

    Args:
        schedule: the best order.
        value: its step_time, period or makespan in seconds, as asked for.
        outcome: optimal where the value meets the bound.
        bound: the strongest lower bound of that figure, with the device it argues over.
        units: work units used.
    """

    schedule: Schedule
    value: float
    outcome: PlanStatus
    bound: Bound
    units: int


def search(
    placement: Placement,
    chunk_costs: Sequence[ChunkCost],
    costs: CostModel,
    num_microbatches: int,
    limits: Sequence[float] | None = None,
    effort: int = DEFAULT_EFFORT,
    seed: int = 0,
    seconds: float | None = None,
    objective: Objective | str = Objective.STEP_TIME,
    warm_starts: Sequence[Schedule] = (),
) -> SearchResult:
    """Search the best order of a placement.

    Args:
        placement: chunks to devices.
        chunk_costs: one cost per chunk, for a device of speed 1.
        costs: links and device speeds.
        num_microbatches: m.
        limits: activation bytes of each device; None for no limit.
        effort: work units, see `DEFAULT_EFFORT`.
        seed: of the random stream.
        seconds: stop before the round that would end later than this; None for no cap.
        objective: what to minimise.
        warm_starts: orders that the result is never worse than, as far as they fit.

    Raises:
        ValueError: a limit is below the smallest with which any order exists.
    """
    searcher = Searcher(placement, chunk_costs, costs, num_microbatches, limits, seed, objective, warm_starts)
    searcher.advance(effort, None if seconds is None else time.perf_counter() + seconds)
    return searcher.result()


class Searcher:
    """A search that can be continued: `advance` to an effort, look at `value`, go on. Arguments as in `search`."""

    def __init__(
        self,
        placement: Placement,
        chunk_costs: Sequence[ChunkCost],
        costs: CostModel,
        num_microbatches: int,
        limits: Sequence[float] | None = None,
        seed: int = 0,
        objective: Objective | str = Objective.STEP_TIME,
        warm_starts: Sequence[Schedule] = (),
    ) -> None:
        self.instance = build_instance(placement, chunk_costs, costs, num_microbatches, limits)
        for d, least in enumerate(minimum_memory(self.instance)):
            if least > self.instance.limit[d]:
                raise ValueError(
                    f"device {d} may hold {limits[d] if limits else np.inf:g} activation bytes, "
                    f"but its chunks need {least:g} for one microbatch; give it at least that"
                )
        self.objective = Objective(objective)
        self.bound = lower_bound(self.instance, self.objective)
        self._costs = costs
        self._table = tabulate(placement, chunk_costs, costs, num_microbatches) if self.objective is Objective.PERIOD else None
        self._own_start = 0.0 if self.objective is Objective.MAKESPAN else 1.0
        self._durations = clock_durations(self.instance)
        self._stream = new_stream(seed)
        self._vectors: list[tuple[float, int, np.ndarray, Instance, np.ndarray | None]] = []
        self._starts: list[tuple[float, np.ndarray]] = []
        self._untried = all_manners(self.instance, self._starts)
        self._stretched: tuple[Instance, np.ndarray, Iterator[tuple[np.ndarray, bool]]] | None = None
        self._leveller = Leveller(self.instance, self.bound.seconds, self._own_start, self._stream)
        self._has_plenty = bool(self.instance.limit.min() > _PLENTY * self.instance.activation.sum())
        self._begun = False
        self._round = 0
        self._units = 0
        self._seconds_per_unit = 0.0
        self._order = serial_order(self.instance)
        self.value = self._figure(self._order)
        self._tuned = self._own_order = self._order
        self._own_value = self.value
        for schedule in warm_starts:
            self.offer(schedule)

    @property
    def optimal(self) -> bool:
        """Whether the best order meets the bound."""
        return self.value <= self.bound.seconds * (1.0 + 1e-9)

    @property
    def gap(self) -> float:
        """How much of the value the bound does not explain."""
        return 1.0 - self.bound.seconds / self.value if self.value > 0.0 else 0.0

    def result(self) -> SearchResult:
        """The best so far."""
        outcome = PlanStatus.OPTIMAL if self.optimal else PlanStatus.FEASIBLE
        return SearchResult(to_schedule(self.instance, self._order), self.value, outcome, self.bound, self._units)

    @property
    def units(self) -> int:
        """Work units used so far."""
        return self._units

    def offer(self, schedule: Schedule) -> None:
        """Take over an order if it fits and is better; what the search itself has found is improved beside it."""
        self._offer(from_schedule(self.instance, schedule), is_own=False)

    def begin(self) -> None:
        """Try every start of the list scheduler once, unless done: the first good plan."""
        if self._begun:
            return
        self._begun = True
        levels = (len(default_parameters(self.instance)) - 6) // 6
        starts = [default_parameters(self.instance), *starting_parameters(levels, self.instance.num_devices)]
        if len(starts) == 1:  # nothing is known of such placements: the manners of the first round come at once
            starts += manners(starts[0], self.instance.num_devices)
        is_large = self.instance.num_passes > _PASSES_FOR_ALL_CLOCKS
        for start in starts:
            costs = []
            for clock in [int(start[CLOCK])] if is_large else range(NUM_CLOCKS):
                vector = start.copy()
                vector[CLOCK] = clock
                costs.append(self._tune(vector, 1))
                if self.optimal:
                    return
            self._starts.append((min(costs), start))

    def advance(self, effort: int, deadline: float | None = None) -> None:
        """Run all rounds that fit into an effort, counted from the beginning of the search.

        Args:
            effort: work units.
            deadline: `time.perf_counter()` after which no round may end, judged by the speed of the rounds before.
        """
        self.begin()
        while not self.optimal:
            size = 2 ** (self._round // 2)
            started = time.perf_counter()
            if self._units + size > effort or (deadline is not None and started + size * self._seconds_per_unit > deadline):
                return
            total = self.instance.num_passes
            unit = min(_PASSES_PER_UNIT * (max(1.0, total / 6144) * min(1.0, total / 1024)) ** 0.6, _MOST_PASSES_PER_UNIT)
            if self._round % 2 == 0:
                evaluations = max(2, int(size * unit / total))
                if self._has_plenty:
                    evaluations -= self._stretch(evaluations // 2) if self._round >= _FIRST_STRETCHED else 0
                    evaluations -= self._sweep(max(0, evaluations))
                vector, within, warm_up_lag = default_parameters(self.instance), self.instance, None
                if self._vectors:
                    _, _, vector, within, warm_up_lag = self._vectors[self._round // 2 % min(len(self._vectors), _KEPT_VECTORS)]
                if evaluations > 0 and not self.optimal:
                    self._tune(vector, evaluations, within, warm_up_lag=warm_up_lag)
            else:
                work = int(size * unit * _LOOKS_PER_PASS)
                if self._has_plenty and self._round >= _FIRST_STRETCHED:
                    self._level(work // 2)
                    work -= work // 2
                self._anneal(work)
            self._round += 1
            self._units += size
            self._seconds_per_unit = (time.perf_counter() - started) / size

    def _sweep(self, evaluations: int) -> int:
        """Go on to try the starts in other manners; how many were tried."""
        tried = 0
        for vector, within in itertools.islice(self._untried, evaluations):
            self._tune(vector, 1, within)
            tried += 1
            if self.optimal:
                break
        return tried

    def _stretch(self, evaluations: int) -> int:
        """Evolve starts by stretched transfers, the plain one and known ones in turn; how many orders were tried.

        What comes out differs much from time to time, so there are many short evolutions, and the best of them are levelled.
        From the plain start the waits of all devices count, as they do in levelling; known ones are near a good order, and
        only their longest span does.
        """
        tried = 0
        if self._stretched is None:
            lag, warm_up_lag = stretched_lags(self.instance)
            within, clock, ranked = self.instance._replace(lag=lag), self._durations[:1], []
            for tried, (_, start) in enumerate(self._starts, 1):
                vector = start.copy()
                vector[CLOCK] = 0
                ranked.append((self._tune(vector, 1, within, clock, warm_up_lag), tried, vector))
            known = [vector for *_, vector in sorted(ranked, key=lambda r: r[:2])]
            plain = default_parameters(self.instance)
            in_turn = itertools.cycle([start for vector in known for start in ((plain, True), (vector, False))])
            self._stretched = within, warm_up_lag, in_turn
        within, warm_up_lag, starts = self._stretched
        while tried < evaluations and not self.optimal:
            share = min(_EVALUATIONS_OF_A_START, evaluations - tried)
            vector, is_plain = next(starts)
            cost = self._tune(vector, share, within, self._durations[:1], warm_up_lag, levels=is_plain)
            if np.isfinite(cost):
                self._leveller.add(cost, self._tuned)
            tried += share
        return tried

    def _tune(
        self,
        vector: np.ndarray,
        evaluations: int,
        within: Instance | None = None,
        durations: np.ndarray | None = None,
        warm_up_lag: np.ndarray | None = None,
        levels: bool = False,
    ) -> float:
        """Evolve a vector, offer the best order; its cost, infinite where there was none.

        Args:
            vector: where to start.
            evaluations: orders to build.
            within: the same problem with limits that are not larger, or with other transfers to order by.
            durations: clocks; None for all.
            warm_up_lag: see `Clock`; None for the transfers of `within`.
            levels: whether the waits of all devices count instead of the longest span, for `levelling` to go on from.
        """
        within = self.instance if within is None else within
        found, order = vector.copy(), np.empty(self.instance.num_passes, np.int32)
        durations = self._durations if durations is None else durations
        warm_up_lag = np.zeros(self.instance.num_chunks) if warm_up_lag is None else warm_up_lag
        least, heat = (self.bound.seconds, _COOL) if levels else (np.inf, _WARM)
        cost = tune(
            self.instance, within, durations, warm_up_lag, vector, self._stream, evaluations, self._own_start, least, heat,
            found, order,
        )  # fmt: skip
        if not np.isfinite(cost):
            return cost
        if levels:
            cost = measure(self.instance, order, self._own_start)
        if all(cost != known[0] for known in self._vectors):
            self._vectors.append((cost, len(self._vectors), found, within, warm_up_lag))
            self._vectors = sorted(self._vectors, key=lambda v: v[:2])[: 2 * _KEPT_VECTORS]
        self._tuned = order
        self._take(order, self._figure(order) if self.objective is Objective.PERIOD else cost)
        return cost

    def _anneal(self, work: int) -> None:
        """Continue from the best order of the search's own; every other time from an order that was offered, where that is
        the best, else from the order tuned last; from the best where these are far behind.

        An order that was offered may be better than what tuning finds, and yet leave less to be improved.
        """
        is_offered = self.value < self._own_value
        is_own = True
        order = self._order
        if self._round // 2 % 2 == 1:
            if is_offered:
                is_own = False
            elif self._figure(self._tuned) <= 1.02 * self.value:
                order = self._tuned
        elif is_offered:
            is_own = self._own_value <= _NOT_FAR_BEHIND * self.value
            order = self._own_order if is_own else self._order
        forward = float(self.instance.duration.max())
        if forward <= 0.0:
            return
        order = order.copy()
        hot = 0.006 if self._round % 4 == 1 else 0.02
        anneal(
            positive(self.instance), order, self._stream, work, hot * forward, 0.002 * forward, 0.1, 3.0, 0.6, self._own_start
        )
        self._offer(order, is_own)

    def _level(self, work: int) -> None:
        """Level the waits of the best order and of what stretched transfers gave."""
        if self.instance.duration.max() > 0.0:
            for order in self._leveller.run(work, lambda: self._order):
                self._offer(order)
                if self.optimal:
                    break

    def _offer(self, order: np.ndarray, is_own: bool = True) -> None:
        if len(order) != self.instance.num_passes or not fits_memory(self.instance, order):
            return
        self._take(order, self._figure(order), is_own)

    def _take(self, order: np.ndarray, value: float, is_own: bool = True) -> None:
        """Keep an order that fits, where it is the best."""
        if is_own and value < self._own_value:
            self._own_value, self._own_order = value, order.copy()
        if value < self.value:
            self.value, self._order = value, order.copy()

    def _figure(self, order: np.ndarray) -> float:
        if self._table is not None:
            offsets = self.instance.offset.astype(np.int64)
            return steady_period(self._table, order.astype(np.int64), offsets, self._costs)
        return measure(self.instance, order, self._own_start)
