"""`python -m lightning_zb.planning.compiling`: the search's loops, compiled once an installation, so that no run waits."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from lightning_zb.planning import simulation
from lightning_zb.planning.costs import CostModel, LayerCost, Link
from lightning_zb.planning.planner import make_plan


def is_compiled() -> bool:
    """Whether this installation keeps the compiled loops that every plan needs; where not, the first plan takes a minute."""
    folder = Path(simulation.run_orders.stats.cache_path or ".")
    return any(folder.glob("simulation.run_orders-*.nbi"))


@cache
def compile_search() -> None:
    """Load the compiled loops of `auto`; where there are none yet, a minute is spent on compiling and keeping them."""
    layers = tuple(LayerCost("", 1.0 + i % 3, 2.0, 1.0 + i % 2, 1.0, 1.0, output_bytes=0.2) for i in range(4))
    costs = CostModel(layers, link=Link(bandwidth=1.0))
    for partition in (None, "even"):  # unlike layers, whose bound no order meets, so that nothing is left out
        make_plan(costs, 2, 2, "auto", 0.9, partition, effort=4)


if __name__ == "__main__":
    compile_search()
