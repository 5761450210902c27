"""When steps may be optimistic, by mode and by plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zb.execution.offline import offline_executors
from lightning_zb.planning.costs import CostModel, LayerCost
from lightning_zb.planning.planner import make_plan
from lightning_zb.stepping import PostValidation, StepEnding, StepOwner, StepRules
from tests.execution.pipeline_models import SleepingRunner

COSTS = CostModel((LayerCost("layer", 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0),) * 8)
GAINS, GAINS_NOTHING = make_plan(COSTS, 4, 8, "zb-v", 1.0), make_plan(COSTS, 4, 8, "zb-v", 0.5)
# devices run out of step within a step, but the validation keeps each from beginning the next before the last has ended
PERIOD_IS_MAKESPAN = make_plan(CostModel(COSTS.layers * 2), 8, 8, "zb-v", 1.0)


def ending(mode, plan, may_copy=True, **rules) -> StepEnding:
    owner = StepOwner(torch.optim.SGD([nn.Parameter(torch.ones(2))]), list, lambda p: False)
    executors = offline_executors([SleepingRunner({}, 8)])
    return StepEnding(owner, executors, StepRules(PostValidation(mode), **rules), plan, may_copy)


def is_ever_optimistic(step_ending: StepEnding) -> bool:
    return step_ending._step.switch.may_be_optimistic


@pytest.mark.parametrize("plan", [GAINS_NOTHING, PERIOD_IS_MAKESPAN])
def test_auto_is_decided_again_with_each_plan(plan):
    auto = ending("auto", plan)
    assert not is_ever_optimistic(auto)
    auto.replan(GAINS, may_copy=True)
    assert is_ever_optimistic(auto)
    assert not auto._step.switch.is_optimistic  # first it waits for steps that do not clip
    for _ in range(8):
        auto._step.switch.note(restarted=False)
    switch = auto._step.switch
    auto.replan(GAINS, may_copy=True)
    assert auto._step.switch is switch  # what it has learnt stays where nothing changes
    auto.replan(plan, may_copy=True)
    assert not is_ever_optimistic(auto)
    assert auto.statistics.switches == 1


def test_auto_takes_no_copy_that_a_budget_does_not_hold():
    auto = ending("auto", GAINS_NOTHING)
    auto.replan(GAINS, may_copy=False)
    assert not is_ever_optimistic(auto)
    assert not is_ever_optimistic(ending("auto", GAINS, may_copy=False))


@pytest.mark.parametrize(("mode", "expected"), [("off", False), ("exact", True)])
def test_other_modes_do_not_depend_on_the_plan(mode, expected):
    fixed = ending(mode, GAINS)
    for plan in (GAINS_NOTHING, GAINS):
        fixed.replan(plan, may_copy=True)
        assert is_ever_optimistic(fixed) is expected


def test_a_reader_of_gradients_keeps_steps_synchronous():
    with pytest.warns(UserWarning, match="user code reads gradients"):
        auto = ending("auto", GAINS, keeps_gradients=True)
    auto.replan(GAINS, may_copy=True)
    assert not is_ever_optimistic(auto)
