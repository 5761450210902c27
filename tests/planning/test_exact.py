"""The exact solver: proofs on small problems, against brute force."""

from __future__ import annotations

import random

import pytest

from lightning_zb.planning.costs import ChunkCost, CostModel, Link
from lightning_zb.planning.instance import build_instance, minimum_memory, serial_order, to_schedule
from lightning_zb.planning.placement import Placement, cyclic
from lightning_zb.planning.plan import PlanStatus
from lightning_zb.planning.search import search
from tests.planning.reference import peaks
from tests.planning.test_bounds import best_by_brute_force

pytest.importorskip("ortools")
from lightning_zb.planning.exact import solve


# Qi et al. (ICLR 2024), Table 6, 1.5B; optima proved with an independent CP-SAT model (ms)
@pytest.mark.parametrize(("budget", "optimum"), [(1.0, 456.6), (1.5, 415.6), (2.0, 415.6)])
def test_four_devices_eight_microbatches_sequential(budget, optimum):
    chunks = [ChunkCost(18.522, 18.086, 9.337, 201216, 73728)] * 4
    result = solve(cyclic(4), chunks, CostModel((), Link(0.601)), 8, [budget * 4 * 201216] * 4, seconds=20)
    assert result.status is PlanStatus.OPTIMAL
    assert result.value == pytest.approx(optimum, abs=0.05)


@pytest.mark.parametrize(
    ("placement", "m", "chunks", "slack"),
    [
        (Placement((0, 1), 2), 3, [ChunkCost(2, 3, 1, 1, 1), ChunkCost(3, 2, 2, 2, 1)], 1.0),
        (Placement((0, 1), 2), 3, [ChunkCost(1, 5, 0, 1, 2), ChunkCost(4, 1, 3, 1, 0)], 2.0),
        (Placement((0, 1, 0), 2), 1, [ChunkCost(2, 3, 1, 1, 1), ChunkCost(3, 2, 2, 2, 1), ChunkCost(1, 2, 3, 1, 1)], 0.0),
    ],
)
def test_the_optimum_is_that_of_brute_force(placement, m, chunks, slack):
    costs = CostModel((), Link(1.5))
    unlimited = build_instance(placement, chunks, costs, m)
    least = [
        sum(max(chunks[c].activation_bytes, chunks[c].weight_stash_bytes) for c in placement.chunks_of(d)) for d in range(2)
    ]
    limits = [bytes_ + slack for bytes_ in least]
    instance = build_instance(placement, chunks, costs, m, limits)
    warm = to_schedule(unlimited, serial_order(unlimited))
    result = solve(placement, chunks, costs, m, limits, seconds=20, warm_start=warm)
    result.schedule.check(placement)
    assert all(p <= limit for p, limit in zip(peaks(result.schedule, placement, chunks), limits, strict=True))
    assert result.status is PlanStatus.OPTIMAL
    assert result.value == pytest.approx(best_by_brute_force(instance, 1.0), abs=result.resolution)


@pytest.mark.parametrize("seed", range(4))
def test_the_search_is_within_five_percent_of_the_optimum(seed):
    """Unequal chunks and links, W of nothing here and there, one device without room to spare."""
    stream = random.Random(seed)
    placement = (cyclic(3), Placement((0, 1, 1, 0), 2), Placement((0, 1, 0, 1), 2), Placement((1, 0, 2), 3))[seed]
    chunks = [
        ChunkCost(
            stream.choice([1, 2, 3]),
            stream.choice([1, 2, 4]),
            stream.choice([0, 1, 3]),
            stream.choice([1.0, 2.0]),
            stream.choice([0.0, 0.5, 1.0]),
        )
        for _ in placement.devices
    ]
    costs = CostModel((), Link(stream.choice([0.5, 2.0])))
    m = (4, 2, 3, 4)[seed]
    least = minimum_memory(build_instance(placement, chunks, costs, m))
    limits = [bytes_ * (1.0 if d == seed % len(least) else 2.5) for d, bytes_ in enumerate(least)]
    found = search(placement, chunks, costs, m, limits)
    optimum = solve(placement, chunks, costs, m, limits, seconds=60, warm_start=found.schedule)
    assert optimum.status is PlanStatus.OPTIMAL
    assert found.value <= 1.05 * optimum.value + optimum.resolution


def test_too_little_memory_is_infeasible_and_says_what_is_needed():
    result = solve(cyclic(2), [ChunkCost(1, 1, 1, 4.0, 1.0)] * 2, CostModel(()), 2, [4.0, 3.0])
    assert result.status is PlanStatus.INFEASIBLE
    assert "device 1 needs 4" in result.message


def test_the_period_has_no_exact_model():
    with pytest.raises(ValueError, match="step_time or makespan"):
        solve(cyclic(2), [ChunkCost(1, 1, 1)] * 2, CostModel(()), 2, objective="period")
