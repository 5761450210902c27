"""Where the co-optimizer begins: the placements and partitions of known schedules."""

from __future__ import annotations

from collections.abc import Iterator, Set
from itertools import combinations, product
from math import comb

import numpy as np

from lightning_zb.planning.cooptimize.balancing import Loads, balance, level
from lightning_zb.planning.cooptimize.cut_rules import CutRules
from lightning_zb.planning.cooptimize.layout import Layout, layout_of, tidy
from lightning_zb.planning.cooptimize.phases import Phase
from lightning_zb.planning.costs import CostModel
from lightning_zb.planning.partitioning import make_partition
from lightning_zb.planning.placement import Placement, cyclic, wave

_FEW_LAYOUTS = 1_000  # of a problem so small that all are scored
MOST_CHUNKS_PER_DEVICE = 8  # more transfers than that never paid at the costs of the papers


def known_placements(num_devices: int, num_items: int) -> dict[str, Placement]:
    """Sequential, V, waves and cyclic placements of as many chunks per device as the items allow.

    Args:
        num_devices: devices of the pipeline.
        num_items: that chunks are made of.
    """
    most = max(1, min(MOST_CHUNKS_PER_DEVICE, num_items // num_devices))
    placements = {"sequential": cyclic(num_devices)}
    if num_devices == 1:
        return placements
    placements.update({f"wave-{v}": wave(num_devices, v) for v in range(2, most + 1)})
    placements.update({f"cyclic-{v}": cyclic(num_devices, v) for v in range(2, most + 1)})
    return placements


def starting_layouts(
    costs: CostModel, loads: Loads, rules: CutRules, phases: Set[Phase], placement: Placement | None, stream: np.ndarray
) -> Iterator[Layout]:
    """Even, chunk-balanced and device-balanced cuts of every known placement, as far as the phases may change them.

    Args:
        costs: the items.
        loads: the same as prefix sums.
        rules: what cuts must keep to.
        phases: that may change; without the placement's all are sequential, without the partition's all even.
        placement: one that is given; None: the known ones.
        stream: of random numbers, advanced.
    """
    num_devices = len(loads.speed)
    if placement is not None:
        placements = {"given": placement}
    elif Phase.PLACEMENT in phases:
        placements = known_placements(num_devices, len(costs.layers))
    else:
        placements = {"sequential": cyclic(num_devices)}
    if placement is None and phases >= {Phase.PARTITION, Phase.PLACEMENT}:
        yield from _all_layouts(loads, rules)
    for where in placements.values():
        for spec in ("even", "balanced") if Phase.PARTITION in phases else ("even",):
            try:
                partition = make_partition(spec, costs, where)
            except ValueError:  # fewer layers than chunks
                continue
            if rules.allows(partition):
                yield layout_of(partition, where)
        if Phase.PARTITION in phases:
            balanced = balance(loads, where.devices)
            if balanced is not None and rules.allows(balanced.partition):
                yield balanced
                yield level(loads, balanced, stream)


def _all_layouts(loads: Loads, rules: CutRules) -> Iterator[Layout]:
    """Every layout of so many chunks that there are few; none where even one chunk a device leaves too many."""
    num_devices, num_items, left = len(loads.speed), loads.num_items, _FEW_LAYOUTS
    for num_chunks in range(num_devices, num_items + 1):
        left -= comb(num_items - 1, num_chunks - 1) * num_devices**num_chunks
        if left < 0:
            return
        for inner in combinations(range(1, num_items), num_chunks - 1):
            for devices in product(range(num_devices), repeat=num_chunks):
                layout = tidy((0, *inner, num_items), devices, num_devices)
                if layout is not None and rules.allows(layout.partition):
                    yield layout
