"""Numbers that are known: closed forms at unit costs, and the first paper's tables."""

from __future__ import annotations

import pytest

from lightning_zb.planning.costs import CostModel, LayerCost, Link
from lightning_zb.planning.plan import PlanStatus
from lightning_zb.planning.planner import make_plan
from tests.planning.paper import ROWS, V_HALF_PEAK, V_MIN_PEAK, ZB_V_ROWS, unit_costs

# the largest rows take seconds each
TABLE = [pytest.param(row, id=row.name, marks=[pytest.mark.slow] * (row.num_devices > 16)) for row in ROWS]
ZB_V_TABLE = [pytest.param(r, id=f"P{r[0]}-m{r[1]}", marks=[pytest.mark.slow] * (r[0] > 16)) for r in ZB_V_ROWS]

# name, chunks per device, (P, m), makespan, step_time: three public simulators agree on these
GOLDEN = [
    ("1f1b", 1, (8, 32), 117.0, 117.0),
    ("1f1b", 1, (4, 8), 33.0, 33.0),
    ("gpipe", 1, (8, 32), 117.0, 117.0),
    ("interleaved", 2, (8, 32), 106.5, 106.5),
    ("interleaved", 2, (4, 8), 28.5, 28.5),
    ("zb-1p", 1, (8, 32), 103.0, 103.0),
    ("zb-1p", 1, (4, 8), 27.0, 27.0),
    ("zb-h1", 1, (8, 32), 103.0, 103.0),
    ("zb-2p", 1, (8, 32), 103.0, 96.0),
    ("zb-h2", 1, (8, 32), 103.0, 96.0),
    ("zb-v", 2, (8, 32), 99.5, 96.0),
    ("zb-v", 2, (4, 8), 25.5, 24.0),
]


@pytest.mark.parametrize(("name", "chunks", "size", "makespan", "step_time"), GOLDEN)
def test_unit_costs(name, chunks, size, makespan, step_time):
    num_devices, num_microbatches = size
    predicted = make_plan(unit_costs(num_devices, chunks), num_devices, num_microbatches, name).predicted
    assert predicted.makespan == pytest.approx(makespan, abs=1e-9)
    assert predicted.step_time == pytest.approx(step_time, abs=1e-9)


@pytest.mark.parametrize(("name", "makespan", "share"), [("v-half", 104.5, 5 / 8), ("v-min", 109.5, 4 / 8)])
def test_unit_costs_below_the_memory_of_1f1b(name, makespan, share):
    predicted = make_plan(unit_costs(8, 2), 8, 32, name).predicted
    assert predicted.makespan <= makespan + 1e-9
    assert max(predicted.peak_bytes) <= share * 8 + 1e-9


@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_table_5_to_four_digits(row, name):
    plan = make_plan(row.costs(), row.num_devices, row.num_microbatches, name)
    assert round(plan.predicted.bubble_rate, 4) == row.bubbles[name]


@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize("name", ["zb-1p", "zb-2p"])
def test_at_or_below_table_5(row, name):
    plan = make_plan(row.costs(), row.num_devices, row.num_microbatches, name)
    assert max(plan.predicted.peak_bytes) <= (1 if name == "zb-1p" else 2) * row.num_devices * (1 + 1e-9)
    assert round(plan.predicted.bubble_rate, 4) <= row.bubbles[name]


@pytest.mark.parametrize("row", TABLE)
def test_interleaved_charges_every_link(row):
    chunks = (row.num_layers + 2) // row.num_devices
    plan = make_plan(row.costs(chunks), row.num_devices, row.num_microbatches, "interleaved-layers")
    assert plan.placement.num_chunks == chunks * row.num_devices
    assert plan.predicted.bubble_rate == pytest.approx(row.bubbles["interleaved"], abs=1e-6)


@pytest.mark.parametrize("row", TABLE)
def test_zb_v_is_as_good_as_the_authors(row):
    plan = make_plan(row.costs(2), row.num_devices, row.num_microbatches, "zb-v")
    assert plan.predicted.bubble_rate <= row.bubbles["zb-v"] + 1e-6
    assert max(plan.predicted.peak_bytes) <= row.num_devices * (1 + 1e-9)


@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize(("name", "peak"), [("v-half", V_HALF_PEAK), ("v-min", V_MIN_PEAK)])
def test_controlled_memory_is_at_or_below_the_public_ones_at_their_peak(row, name, peak):
    budget = peak[row.num_devices] / row.num_devices
    plan = make_plan(row.costs(2), row.num_devices, row.num_microbatches, name, memory_budget=budget)
    assert plan.predicted.bubble_rate <= row.bubbles[name] + 1e-6


@pytest.mark.parametrize("row", ZB_V_TABLE)
def test_zb_v_rows(row):
    num_devices, num_microbatches, forward, backward, weight, comm, activation, stash, bubble = row
    layer = (forward, backward, weight, activation, stash)
    costs = CostModel(tuple(LayerCost(f"{i}", *layer) for i in range(2 * num_devices)), Link(comm))
    plan = make_plan(costs, num_devices, num_microbatches, "zb-v", memory_budget=1.0)
    assert round(plan.predicted.bubble_rate, 4) <= bubble


def test_every_plan_says_how_far_from_optimal_it_can_be():
    row = ROWS[0]
    plan = make_plan(row.costs(2), row.num_devices, row.num_microbatches, "zb-v")  # proved optimal for the V
    assert plan.planner.status is PlanStatus.OPTIMAL
    assert plan.predicted.lower_bound == plan.predicted.step_time
    plan = make_plan(row.costs(2), row.num_devices, row.num_microbatches, "v-min", memory_budget=0.5)
    assert plan.planner.status is PlanStatus.FEASIBLE
    assert sum(plan.predicted.busy) / 8 < plan.predicted.lower_bound < plan.predicted.step_time


@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(2, 4), (3, 9), (4, 8), (5, 17), (8, 16), (8, 32)])
def test_equal_stages_hold_equal_memory_in_a_v(num_devices, num_microbatches):
    """First paper, section 6: no bubble at P x M_B where F, B and W take the same time, on every device the same peak."""
    predicted = make_plan(unit_costs(num_devices, 2), num_devices, num_microbatches, "zb-v").predicted
    assert predicted.peak_bytes == pytest.approx([float(num_devices)] * num_devices)
    assert predicted.step_time == pytest.approx(3.0 * num_microbatches)
