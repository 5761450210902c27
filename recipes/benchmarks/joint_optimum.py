"""The best of all partitions, placements and orders of a small problem, by enumeration and constraint programming."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

from lightning_zb.planning.bounds import bounds_of_orders
from lightning_zb.planning.budget import activation_limits, fits
from lightning_zb.planning.builders.greedy import smallest_limits
from lightning_zb.planning.cooptimize.layout import Layout, tidy
from lightning_zb.planning.exact import solve
from lightning_zb.planning.registry import Problem
from recipes.costs.random_cases import RandomCase


def all_layouts(num_items: int, num_devices: int, most_chunks: int) -> Iterator[Layout]:
    """Every cut into at most so many chunks, on every map to the devices."""
    for num_chunks in range(num_devices, most_chunks + 1):
        for inner in combinations(range(1, num_items), num_chunks - 1):
            for devices in product(range(num_devices), repeat=num_chunks):
                layout = tidy((0, *inner, num_items), devices, num_devices)
                if layout is not None:
                    yield layout


def optimum(case: RandomCase, layout: Layout, above: float) -> float:
    """The step_time of the best order of a layout that the solver finds in a second, mostly proved.

    Args:
        case: the problem.
        layout: partition and placement.
        above: seconds; infinite where no order of the layout can be faster, and where none fits the memory.
    """
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


def joint_optimum(case: RandomCase, most_chunks: int, known: float) -> float:
    """The least step_time over all layouts; `known`, in seconds, where none is faster."""
    best = known
    for layout in all_layouts(len(case.costs.layers), case.num_devices, most_chunks):
        best = min(best, optimum(case, layout, best))
    return best
