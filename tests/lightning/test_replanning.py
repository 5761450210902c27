"""Whether another plan is worth it: what may change, what the budget says, how long planning may take, when to go back."""

from __future__ import annotations

import time

import pytest

from lightning_zb import replanning
from lightning_zb.drift import find_drift
from lightning_zb.plan_choice import Replan
from lightning_zb.planning.budget import InfeasibleBudget
from lightning_zb.planning.costs import CostModel
from lightning_zb.planning.plan import Plan
from lightning_zb.planning.planner import make_plan
from lightning_zb.replanning import Decision, repriced, step_seconds
from lightning_zb.terms import Terms
from tests.lightning.known_costs import EQUAL, UNEQUAL


def decide(running: Plan, costs: CostModel, replan: Replan, schedule: str, budget=None, **terms) -> Decision:
    return replanning.decide(running, costs, Terms(replan=replan, schedule=schedule, budget=budget, **terms))


@pytest.mark.parametrize(
    ("replan", "change"), [("off", "nothing"), ("order", "nothing"), ("partition", "partition"), ("placement", "placement")]
)
def test_only_what_may_change_changes(replan: str, change: str):
    running = make_plan(EQUAL, 2, 8, "zb", 2.0)
    decision = decide(running, UNEQUAL, Replan(replan), "zb", 2.0)
    assert decision.change == change
    assert decision.plan.costs is UNEQUAL
    before = decide(running, UNEQUAL, Replan.OFF, "zb", 2.0).plan
    assert decision.plan.predicted.makespan <= before.predicted.makespan
    if change == "nothing":
        assert (decision.plan.schedule, decision.plan.partition) == (running.schedule, running.partition)


def test_a_plan_is_predicted_again_with_costs_as_they_are_now():
    running = make_plan(EQUAL, 2, 8, "zb", 2.0)
    for priced, took, change in ((repriced(running, UNEQUAL, 2.0), 1.5, "costs"), (running, None, "nothing")):
        decision = replanning.price_again(running, priced, took, 0.01)
        assert (decision.plan, decision.change) == (priced, change)
        assert decision.reason.startswith("a step takes 1.5 s, ") is (took is not None)
        assert f"{running.predicted.makespan:.4g} s were predicted, {priced.predicted.makespan:.4g} s are" in decision.reason


def test_a_plan_over_the_limit_does_not_come_back():
    before, running = make_plan(EQUAL, 2, 8, "zb", 2.0), make_plan(EQUAL, 2, 8, "zb", 1.0)
    assert replanning.go_back(running, 2.0, before, 1.0) is not None
    assert replanning.go_back(running, 2.0, repriced(before, EQUAL, 1.0), 1.0) is None


def test_a_fixed_order_is_left_alone():
    running = make_plan(EQUAL, 2, 8, "1f1b")
    assert decide(running, UNEQUAL, Replan.ORDER, "1f1b").change == "nothing"


def test_a_plan_over_the_limit_gives_way_even_to_a_slower_one():
    running = make_plan(EQUAL, 2, 8, "zb", 2.0)
    decision = decide(running, EQUAL, Replan.ORDER, "zb", 1.0)
    assert decision.change == "order"
    assert "exceeds the memory limit" in decision.reason
    assert max(decision.plan.predicted.peak_bytes) <= EQUAL.activation_bytes < max(running.predicted.peak_bytes)


def test_a_budget_that_nothing_fits_is_refused_or_said():
    running = make_plan(EQUAL, 2, 8, "zb", 1.0)
    decision = decide(running, EQUAL, Replan.ORDER, "zb", 0.1)
    assert decision.change == "nothing"
    assert "smallest that fits" in decision.reason
    with pytest.raises(
        InfeasibleBudget, match=r"one microbatch does not fit memory_budget=0\.1; the smallest that fits is 0\.5"
    ):
        decide(running, EQUAL, Replan.ORDER, "zb", 0.1, must_fit=True)
    assert decide(running, EQUAL, Replan.OFF, "zb", 0.1, must_fit=True).change == "nothing"


def test_a_fixed_order_that_exceeds_its_budget_is_refused():
    running = make_plan(EQUAL, 2, 8, "1f1b")
    assert decide(running, EQUAL, Replan.ORDER, "1f1b", 1.0, must_fit=True).change == "nothing"
    with pytest.raises(
        InfeasibleBudget, match=r"schedule '1f1b' does not fit memory_budget=0\.9; the smallest that fits is 1\.0"
    ):
        decide(running, EQUAL, Replan.ORDER, "1f1b", 0.9, must_fit=True)


def test_ends_that_share_a_parameter_stay_on_one_device():
    running = make_plan(EQUAL, 2, 8, "zb-v", 2.0)
    decision = decide(running, UNEQUAL, Replan.PLACEMENT, "zb-v", 2.0, joins_ends=True)
    assert decision.plan.placement.devices[0] == decision.plan.placement.devices[-1]


def test_a_new_plan_keeps_to_the_constraints():
    running = make_plan(EQUAL, 2, 8, "auto", 2.0, constraints={"together": [["layers.4", "layers.5"]]}, effort=1)
    for replan in (Replan.PARTITION, Replan.PLACEMENT):
        cut = [chunk[0] for chunk in decide(running, UNEQUAL, replan, "auto", 2.0).plan.partition.chunks]
        constraints = {"together": [[f"layers.{i - 1}", f"layers.{i}"] for i in cut[1:]]}
        decision = decide(running, UNEQUAL, replan, "auto", 2.0, constraints=constraints)
        assert not set(cut[1:]) & {chunk[0] for chunk in decision.plan.partition.chunks}


def test_drift_is_a_chunk_that_left_its_plan():
    plan = make_plan(EQUAL, 2, 8, "zb")
    seconds = {(c, part): 4.0 for c in (0, 1) for part in "FBW"}
    assert find_drift(plan, seconds, 0.1) is None
    assert find_drift(plan, seconds | {(1, "B"): 5.0}, 0.1) is None  # 13 instead of 12: 8 %
    assert "chunk 1 takes 14000.0 ms" in (find_drift(plan, seconds | {(1, "B"): 6.0}, 0.1) or "")


def test_a_search_is_told_how_long_it_may_take():
    """Two schedules that search share the time; without time only the first is asked."""
    running = make_plan(EQUAL, 2, 8, "zb-v", 2.0)
    started = time.perf_counter()
    decision = decide(running, UNEQUAL, Replan.PLACEMENT, "auto", 2.0, seconds=0.5)
    assert decision.change != "nothing"
    assert 0 < decision.seconds <= time.perf_counter() - started
    assert "the time for planning is over" in decide(running, UNEQUAL, Replan.ORDER, "zb", 2.0, seconds=0.0).reason


def test_devices_that_run_ahead_are_planned_by_period():
    """zb on a sequential placement: the period of steps that follow each other is shorter than one step end to end."""
    plan = make_plan(EQUAL, 2, 8, "zb", 2.0)
    assert step_seconds(True)(plan) == plan.predicted.period < plan.predicted.makespan == step_seconds(False)(plan)
    running = make_plan(EQUAL, 2, 8, "1f1b")
    for ahead in (False, True):
        decision = decide(running, EQUAL, Replan.PLACEMENT, "1f1b", 2.0, runs_ahead=ahead)
        figure = step_seconds(ahead)
        assert f"saves {100 * (1 - figure(decision.plan) / figure(running)):.1f} % of a step" in decision.reason
        assert figure(decision.plan) <= figure(plan)


def test_without_a_budget_a_search_takes_what_it_gains_by_and_sets_no_limit():
    running = make_plan(EQUAL, 2, 32, "1f1b")
    decision = decide(running, UNEQUAL, Replan.PLACEMENT, "auto", None, most=1.5)
    assert decision.plan.planner.name == "auto"
    assert max(decision.plan.predicted.peak_bytes) <= 1.5 * UNEQUAL.activation_bytes
    assert decision.plan.memory_limit is None
    left = decide(running, UNEQUAL, Replan.PLACEMENT, "auto", [4.0, 9.0], most=1.5).plan
    assert max(left.predicted.peak_bytes) <= 1.5 * UNEQUAL.activation_bytes
    assert left.memory_limit == (4.0 * UNEQUAL.activation_bytes, 9.0 * UNEQUAL.activation_bytes)
