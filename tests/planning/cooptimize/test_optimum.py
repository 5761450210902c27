"""How far from the optimum: of the order against constraint programming, of everything against all layouts."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from lightning_zb.planning.bounds import bounds_of_orders
from lightning_zb.planning.budget import activation_limits, fits
from lightning_zb.planning.builders.greedy import smallest_limits
from lightning_zb.planning.cooptimize import cooptimize
from lightning_zb.planning.cooptimize.layout import Layout, tidy
from lightning_zb.planning.exact import solve
from lightning_zb.planning.registry import Problem
from recipes.costs.random_cases import RandomCase, random_case

pytest.importorskip("ortools")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", range(4))
def test_the_order_is_within_five_percent_of_what_the_solver_makes_of_it(seed):
    case = random_case(seed, num_devices=3, num_layers=5, num_microbatches=2)
    plan = cooptimize(case.costs, 3, 2, case.memory, effort=6)
    result = solve(
        plan.placement,
        case.costs.chunks(plan.partition),
        case.costs,
        2,
        plan.memory_limit,
        seconds=10.0,
        warm_start=plan.schedule,
    )
    assert plan.predicted.step_time <= 1.05 * result.value  # its optimum, or the best order that it found in the time


def all_layouts(num_items: int, num_devices: int, most_chunks: int):
    """Every cut into at most so many chunks, on every map to the devices."""
    for num_chunks in range(num_devices, most_chunks + 1):
        for inner in combinations(range(1, num_items), num_chunks - 1):
            for devices in product(range(num_devices), repeat=num_chunks):
                layout = tidy((0, *inner, num_items), devices, num_devices)
                if layout is not None:
                    yield layout


def optimum(case: RandomCase, layout: Layout, above: float) -> float:
    """The best order of a layout that the solver finds, mostly proved; infinite where its bound is `above` or more."""
    costs, m = case.costs, case.num_microbatches
    partition, placement = layout.partition, layout.placement
    limits = activation_limits(case.memory, costs, partition, placement)
    problem = Problem(placement, costs.chunks(partition), costs, m, limits)
    if not fits(smallest_limits(problem), limits):
        return float("inf")
    arguments = (placement, problem.chunk_costs, costs, m, limits)
    if bounds_of_orders(*arguments)[0].seconds >= above:
        return float("inf")
    return solve(*arguments, seconds=1.0).value


@pytest.mark.parametrize("seed", range(4))
def test_within_five_percent_of_the_best_of_all_layouts(seed):
    case = random_case(seed, num_devices=2, num_layers=4, num_microbatches=2)
    plan = cooptimize(case.costs, 2, 2, case.memory, effort=6)
    ours = plan.predicted.step_time
    for layout in all_layouts(len(case.costs.layers), 2, 4):
        assert ours <= 1.05 * optimum(case, layout, ours / 1.05) * (1 + 1e-9), layout
