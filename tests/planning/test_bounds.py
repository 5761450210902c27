"""Lower bounds against brute force: a bound above an order that fits is a defect."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zb.planning.bounds import Objective, bounds_of_orders, lower_bound, lower_bounds
from lightning_zb.planning.costs import ChunkCost, CostModel, Link
from lightning_zb.planning.instance import build_instance, fits_memory, measure, minimum_memory, serial_order
from lightning_zb.planning.placement import Placement, cyclic, wave
from lightning_zb.planning.schedule import Pass, PassKind, Schedule
from lightning_zb.planning.timeline import least_work, simulate
from tests.planning.reference import peaks


def all_orders(chunks, m):
    """Every order of one device that ascends in each stream and runs F before B before W."""
    total = {(kind, c): m for kind in range(3) for c in chunks}

    def extend(done, order):
        if len(order) == 3 * m * len(chunks):
            yield tuple(order)
            return
        for (kind, c), count in total.items():
            j = done[kind, c]
            if j < count and (kind == 0 or done[kind - 1, c] > j):
                done[kind, c] += 1
                order.append((kind, c, j))
                yield from extend(done, order)
                order.pop()
                done[kind, c] -= 1

    yield from extend(dict.fromkeys(total, 0), [])


def best_by_brute_force(instance, own_start):
    n, m = instance.num_chunks, instance.num_microbatches
    choices = []
    for d in range(instance.num_devices):
        kept = []
        for order in all_orders(instance.chunks_of(d), m):
            held = peak = 0.0
            for kind, c, _ in order:
                a, s = instance.activation[c], instance.stash[c]
                held += (a, s - a, -s)[kind]
                peak = max(peak, held)
            if peak <= instance.limit[d]:
                kept.append([(kind * n + c) * m + j for kind, c, j in order])
        choices.append(kept)
    return min(
        measure(instance, np.array([*itertools.chain(*combo)], np.int32), own_start) for combo in itertools.product(*choices)
    )


times = st.integers(0, 6).map(float)
chunk = st.builds(
    ChunkCost,
    forward=times,
    backward_input=times,
    backward_weight=times,
    activation_bytes=st.integers(1, 3).map(float),
    weight_stash_bytes=st.integers(0, 3).map(float),
)


@st.composite
def small_instances(draw, placements, microbatches):
    placement = draw(placements)
    chunks = [draw(chunk) for _ in range(placement.num_chunks)]
    speeds = draw(st.none() | st.tuples(*[st.sampled_from([0.5, 1.0, 2.0])] * placement.num_devices))
    costs = CostModel((), Link(draw(st.integers(0, 6))), speeds)
    m = draw(microbatches)
    unlimited = build_instance(placement, chunks, costs, m)
    # any device may be the tight one, beside devices without a limit
    limits = [least + draw(st.sampled_from([0.0, 1.0, 2.0, 4.0, np.inf])) for least in minimum_memory(unlimited)]
    return build_instance(placement, chunks, costs, m, limits)


sequential = st.sampled_from([Placement((0, 1), 2), Placement((1, 0), 2), cyclic(1)])
folded = st.sampled_from([Placement((0, 1, 0), 2), Placement((0, 0, 1), 2), cyclic(3)])


@settings(max_examples=60, deadline=None)
@given(small_instances(sequential, st.integers(1, 3)) | small_instances(folded, st.just(1)), st.booleans())
def test_no_bound_exceeds_the_optimum(instance, isolated):
    objective = Objective.MAKESPAN if isolated else Objective.STEP_TIME
    optimum = best_by_brute_force(instance, 0.0 if isolated else 1.0)
    for bound in lower_bounds(instance, objective):
        assert bound.seconds <= optimum * (1 + 1e-9), bound


def each_fusing(order):
    """The order of one device with every choice of whole backwards."""
    if not order:
        yield ()
        return
    for rest in each_fusing(order[1:]):
        yield (order[0], *rest)
    if len(order) > 1 and order[0].kind is PassKind.BACKWARD_INPUT:
        kind, *cell = PassKind.BACKWARD, order[0].chunk, order[0].microbatch
        if order[1] == Pass(PassKind.BACKWARD_WEIGHT, *cell):
            for rest in each_fusing(order[2:]):
                yield (Pass(kind, *cell), *rest)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.booleans())
def test_no_bound_exceeds_the_optimum_with_whole_backwards(data, isolated):
    placement = data.draw(st.sampled_from([Placement((0, 1), 2), Placement((1, 0), 2), Placement((0, 1, 0), 2), cyclic(1)]))
    m = data.draw(st.integers(1, 2 if placement.num_chunks < 3 else 1))
    chunks = [replace(data.draw(chunk), backward=data.draw(times)) for _ in range(placement.num_chunks)]
    costs = CostModel(
        (), Link(data.draw(st.integers(0, 6))), data.draw(st.sampled_from([None, (1.0, 2.0)[: placement.num_devices]]))
    )
    least = minimum_memory(build_instance(placement, chunks, costs, m))
    limits = [value + data.draw(st.integers(0, 4)) for value in least]
    letters = (PassKind.FORWARD, PassKind.BACKWARD_INPUT, PassKind.BACKWARD_WEIGHT)
    choices = [
        {
            fused
            for order in all_orders(placement.chunks_of(d), m)
            for fused in each_fusing(tuple(Pass(letters[kind], c, j) for kind, c, j in order))
        }
        for d in range(placement.num_devices)
    ]
    optimum = np.inf
    for orders in itertools.product(*choices):
        schedule = Schedule(orders)
        if all(p <= limit for p, limit in zip(peaks(schedule, placement, chunks), limits, strict=True)):
            try:
                timeline = simulate(schedule, placement, chunks, costs)
            except ValueError:  # a deadlock
                continue
            optimum = min(optimum, timeline.makespan if isolated else timeline.step_time)
    objective = Objective.MAKESPAN if isolated else Objective.STEP_TIME
    for bound in bounds_of_orders(placement, chunks, costs, m, limits, objective):
        assert bound.seconds <= optimum * (1 + 1e-9), bound
    assert least_work(placement, chunks, costs, m) <= optimum * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(small_instances(folded, st.integers(1, 8)))
def test_the_serial_order_shows_that_the_smallest_memory_suffices(instance):
    least = np.array(minimum_memory(instance))
    order = serial_order(instance)
    assert fits_memory(instance._replace(limit=least + 1e-9), order)
    assert measure(instance, order) >= lower_bound(instance).seconds * (1 - 1e-9)


def paper_instance(placement, m, forward, backward, weight, lag, activation, stash, limit):
    v = placement.num_chunks // placement.num_devices
    chunks = [ChunkCost(forward / v, backward / v, weight / v, activation / v, stash / v)] * placement.num_chunks
    limits = [limit * placement.num_devices * activation] * placement.num_devices
    return build_instance(placement, chunks, CostModel((), Link(lag)), m, limits)


# Qi et al. (ICLR 2024), Table 6, 1.5B m=24 and 6.2B m=24; the bubble rates of zb-v and zb-1p there meet these bounds
@pytest.mark.parametrize(
    ("placement", "row", "bubble"),
    [
        (wave(8, 2), (24, 18.522, 18.086, 9.337, 0.601, 201216, 73728, 1.0), 0.0703),
        (cyclic(8), (24, 18.522, 18.086, 9.337, 0.601, 201216, 73728, 1.0), 0.1585),
        (wave(8, 2), (24, 29.718, 29.444, 19.927, 0.527, 303104, 131072, 1.0), 0.0403),
        (cyclic(8), (24, 29.718, 29.444, 19.927, 0.527, 303104, 131072, 1.0), 0.1323),
        (wave(8, 4), (24, 29.718, 29.444, 19.927, 0.527, 303104, 131072, 1.0), 0.0077),
    ],
)
def test_bounds_of_the_published_rows(placement, row, bubble):
    instance = paper_instance(placement, *row)
    assert 1 - instance.ideal_seconds / lower_bound(instance).seconds == pytest.approx(bubble, abs=5e-5)


def test_the_critical_device_is_named():
    slow = CostModel((), Link(0.0), (1.0, 0.25, 1.0))
    instance = build_instance(cyclic(3), [ChunkCost(1, 1, 1)] * 3, slow, 8)
    bounds = {b.name: b for b in lower_bounds(instance)}
    assert bounds["work"].device == 1
    assert bounds["work"].seconds == 8 * 3 * 4
    assert bounds["relay"].device == 1
    assert bounds["relay"].seconds > 8 * 2 * 4


def test_unlimited_memory_has_no_memory_or_path_bound():
    instance = build_instance(cyclic(2), [ChunkCost(1, 1, 1, 1.0, 1.0)] * 2, CostModel(()), 4)
    assert {b.name for b in lower_bounds(instance)}.isdisjoint({"memory", "path"})


def test_only_work_and_memory_bound_the_period():
    instance = build_instance(cyclic(2), [ChunkCost(1, 1, 1, 1.0, 1.0)] * 2, CostModel(()), 4, [1.0, 1.0])
    bounds = lower_bounds(instance, Objective.PERIOD)
    assert {b.name for b in bounds} == {"work", "memory"}
    # one microbatch at a time on device 0: F0 F1 B1 B0 and the W that follows B0 (which holds memory, but not in its own W)
    assert bounds[0].seconds == pytest.approx(4 * 4.0)
