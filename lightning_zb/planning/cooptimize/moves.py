"""Steps from one layout to its neighbours: layers between chunks, chunks between devices.

Everything starts from the devices with the least and the most idle time, as the second paper's generator does; what
follows are the neighbours that it does not name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from lightning_zb.planning.cooptimize.balancing import Loads, balance, descend
from lightning_zb.planning.cooptimize.layout import Layout, tidy
from lightning_zb.planning.cooptimize.scoring import Score
from lightning_zb.planning.random_stream import below


def partition_moves(score: Score, loads: Loads) -> Iterator[Layout]:
    """Layouts with other cuts and the same devices.

    Args:
        score: where to start; the idle times of its devices say which way layers should go.
        loads: which cuts are possible.
    """
    layout = score.layout
    by_idle = np.argsort(score.idle, kind="stable").tolist()
    for busy in by_idle[: max(1, len(by_idle) // 2)]:
        for idle in by_idle[: len(by_idle) // 2 - 1 : -1]:
            if busy != idle:
                yield from _transfers(layout, loads, busy, idle)
    order = {device: rank for rank, device in enumerate(by_idle)}
    cuts = sorted(range(1, len(layout.counts)), key=lambda i: min(order[layout.devices[i - 1]], order[layout.devices[i]]))
    for step in (1, -1, 2, -2):
        for i in cuts:
            yield from _shifted(layout, loads, i, i, step)


def _transfers(layout: Layout, loads: Loads, source: int, destination: int) -> Iterator[Layout]:
    """One item less on a device and one more on another; the chunks between pass theirs on. Nearest pairs first."""
    pairs = [
        (abs(a - b), a, b)
        for a, owner in enumerate(layout.devices)
        if owner == source
        for b, other in enumerate(layout.devices)
        if other == destination
    ]
    for _, a, b in sorted(pairs)[:3]:
        if a < b:
            yield from _shifted(layout, loads, a + 1, b, -1)
        else:
            yield from _shifted(layout, loads, b + 1, a, 1)


def _shifted(layout: Layout, loads: Loads, first: int, last: int, step: int) -> Iterator[Layout]:
    """The cuts first..last moved by a number of places; nothing where that is not allowed."""
    cuts = list(layout.cuts)
    places = np.flatnonzero(loads.may_cut)
    for i in range(first, last + 1):
        if loads.must_cut[cuts[i]]:
            return
        at = int(np.searchsorted(places, cuts[i])) + step
        if not 0 <= at < len(places):
            return
        cuts[i] = int(places[at])
    if any(b < a for a, b in pairwise(cuts)):
        return
    found = tidy(cuts, layout.devices, layout.num_devices)
    if found is not None:
        yield found


def placement_moves(score: Score, loads: Loads, stream: np.ndarray, alike: bool) -> Iterator[Layout]:
    """Layouts with chunks on other devices, in a random order, each with its cuts kept and balanced anew.

    Args:
        score: where to start.
        loads: of the items.
        stream: of random numbers, advanced.
        alike: whether exchanging two devices everywhere changes nothing (equal speeds, limits and links).
    """
    layout = score.layout
    changes = [*_group_changes(layout, alike), *_chunk_changes(layout)]
    for i in range(len(changes) - 1, 0, -1):
        j = below(stream, i + 1)
        changes[i], changes[j] = changes[j], changes[i]
    for cuts, devices in changes:
        for found in (descend(loads, cuts, devices), tidy(cuts, devices, layout.num_devices)):
            if found is not None and found != layout:
                yield found
        if len(devices) <= 3 * layout.num_devices:
            found = balance(loads, devices)
            if found is not None and found != layout:
                yield found


def shaken(layout: Layout, loads: Loads, stream: np.ndarray) -> Layout | None:
    """A layout some random steps away, balanced anew: where to climb from once nothing helps."""
    for _ in range(1 + below(stream, 3)):
        changes = list(_chunk_changes(layout))
        cuts, devices = changes[below(stream, len(changes))]
        found = descend(loads, cuts, devices)
        if found is None:
            return None
        layout = found
    return layout


Change = tuple[Sequence[int], Sequence[int]]
"""Cuts and devices."""


def _group_changes(layout: Layout, alike: bool) -> Iterator[Change]:
    """Grouped permutations: legs of as many chunks as there are devices turned round or rotated, devices exchanged."""
    cuts, devices, p = layout.cuts, layout.devices, layout.num_devices
    for start in range(0, len(devices), p):
        leg = devices[start : start + p]
        if len(leg) > 1:
            yield cuts, (*devices[:start], *leg[::-1], *devices[start + p :])
            yield cuts, (*devices[:start], *leg[1:], leg[0], *devices[start + p :])
            yield cuts, (*devices[:start], leg[-1], *leg[:-1], *devices[start + p :])
    if not alike:
        for a in range(p):
            for b in range(a + 1, p):
                swap = {a: b, b: a}
                yield cuts, tuple(swap.get(d, d) for d in devices)


def _chunk_changes(layout: Layout) -> Iterator[Change]:
    """Single chunks exchanged, moved to another device, cut in two or joined to the next."""
    cuts, devices, p = layout.cuts, layout.devices, layout.num_devices
    n = len(devices)
    for i in range(n):
        for j in range(i + 1, n):
            if devices[i] != devices[j]:
                changed = list(devices)
                changed[i], changed[j] = changed[j], changed[i]
                yield cuts, changed
        for d in range(p):
            if d != devices[i]:
                yield cuts, (*devices[:i], d, *devices[i + 1 :])
                if layout.counts[i] > 1:
                    middle = cuts[i] + layout.counts[i] // 2
                    yield (*cuts[: i + 1], middle, *cuts[i + 1 :]), (*devices[: i + 1], d, *devices[i + 1 :])
                    yield (*cuts[: i + 1], middle, *cuts[i + 1 :]), (*devices[:i], d, *devices[i:])
        if i + 1 < n:
            yield (*cuts[: i + 1], *cuts[i + 2 :]), (*devices[:i], *devices[i + 1 :])
