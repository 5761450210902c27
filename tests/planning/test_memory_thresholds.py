"""How much memory the sequential heuristic needs for no bubble: the first paper's Appendix B, and section 5.4."""

from __future__ import annotations

import math

import pytest

from lightning_zb.planning.costs import CostModel, LayerCost, Link
from lightning_zb.planning.planner import make_plan
from tests.planning.paper import ROWS


def nearly_zero(num_devices, times, comm):
    """The M_B from which the bubble of a device is less than T_F: ((P-1)(T_B + 2 T_comm) + P T_F) / T_F."""
    forward, backward, _ = times
    return math.floor(((num_devices - 1) * (backward + 2 * comm) + num_devices * forward) / forward + 1e-9)


def fully_zero(num_devices, times, comm):
    """The M_B that let P - 1 more F in on the first device, about 3 P: the rest of the bubble goes."""
    return nearly_zero(num_devices, times, comm) + num_devices - 1


def bubbles(costs, num_devices, num_microbatches, times, held):
    """For each number of M_B held what the longest device waits, in T_F."""
    work = num_microbatches * sum(times)
    plans = (make_plan(costs, num_devices, num_microbatches, "zb", memory_budget=k / num_devices) for k in held)
    return [(plan.predicted.step_time - work) / times[0] for plan in plans]


def check_thresholds(costs, num_devices, num_microbatches, times, comm):
    near, full = nearly_zero(num_devices, times, comm), fully_zero(num_devices, times, comm)
    held = (near - 2, near - 1, near, full)
    before, just, at, last = bubbles(costs, num_devices, num_microbatches, times, held)
    assert before - just == pytest.approx(1.0)  # each M_B more lets one F more into the warm-up
    assert at < 1.0 <= just + 1e-9
    assert last == pytest.approx(0.0, abs=1e-9)
    return at


ENOUGH_MICROBATCHES = [
    row for row in ROWS if row.num_microbatches >= 8 * row.num_devices or row.name in ("6.2B-32", "14.6B-48")
]


@pytest.mark.parametrize(
    "row", [pytest.param(r, id=r.name, marks=[pytest.mark.slow] * (r.num_devices > 8)) for r in ENOUGH_MICROBATCHES]
)
def test_the_papers_costs(row):
    """Table 6 (Table 9 in arXiv's numbering); the threshold is at about 2 P, the end at about 3 P."""
    num_devices = row.num_devices
    assert 1.8 < nearly_zero(num_devices, row.times, row.comm) / num_devices < 2.1
    assert 2.7 < fully_zero(num_devices, row.times, row.comm) / num_devices < 3.1
    at = check_thresholds(row.costs(), num_devices, row.num_microbatches, row.times, row.comm)
    assert at > 0.1  # the rest, less than one F, needs the memory of P - 1 more of them


@pytest.mark.parametrize(
    ("times", "comm", "num_devices"),
    [
        pytest.param((1.0, 1.0, 1.0), 0.0, 6, id="equal"),
        pytest.param((1.0, 1.2, 0.9), 0.3, 6, id="slow link"),
        pytest.param((1.0, 1.5, 1.2), 0.1, 4, id="long B"),
        pytest.param((1.0, 1.0, 0.8), 2.0, 4, id="link of 2 F"),
        pytest.param((1.0, 1.3, 0.7), 0.05, 8, id="long B, short W"),
    ],
)
def test_other_costs(times, comm, num_devices):
    costs = CostModel((LayerCost("stage", *times, 1.0, 0.4),) * num_devices, Link(comm))
    check_thresholds(costs, num_devices, 8 * num_devices, times, comm)
