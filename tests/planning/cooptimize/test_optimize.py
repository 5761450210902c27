"""The co-optimizer: never worse than what it knows, within memory and demands, the same for a seed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from lightning_zb.planning.bounds import Objective
from lightning_zb.planning.budget import InfeasibleBudget, activation_limits, fits
from lightning_zb.planning.cooptimize import cooptimize, cut_rules
from lightning_zb.planning.costs import CostModel, LayerCost
from lightning_zb.planning.partitioning import even
from lightning_zb.planning.planner import make_plan
from recipes.costs.random_cases import Trait, random_case

NAMED = ("1f1b", "interleaved", "gpipe", "zb-h1", "zb-h2", "zb", "zb-v", "v-half", "v-min", "wave-3")


def plan(case, **options):
    return cooptimize(case.costs, case.num_devices, case.num_microbatches, case.memory, **{"effort": 4, **options})


def never_worse(case, ours):
    """Compare with every schedule by name and every partition that we know, at the same memory."""
    counts = [len(chunk) for chunk in ours.partition.chunks]
    for name in NAMED:
        for partition in ("even", "balanced", counts):
            try:
                theirs = make_plan(case.costs, case.num_devices, case.num_microbatches, name, case.memory, partition)
            except ValueError:  # it does not fit the memory, or the counts belong to another number of chunks
                continue
            assert ours.predicted.step_time <= theirs.predicted.step_time * (1 + 1e-9), (name, partition)


@pytest.mark.parametrize("seed", range(4))
def test_never_worse_than_schedules_by_name(seed):
    case = random_case(seed, num_layers=14, num_microbatches=6)
    ours = plan(case)
    ours.schedule.check(ours.placement)
    limits = activation_limits(case.memory, case.costs, ours.partition, ours.placement)
    assert fits(ours.predicted.peak_bytes, limits)
    never_worse(case, ours)


def test_a_seed_and_an_effort_give_one_plan():
    case = random_case(3, Trait.KINDS, num_layers=12, num_microbatches=6)
    first, second = plan(case), plan(case)
    assert (first.partition, first.placement, first.schedule) == (second.partition, second.placement, second.schedule)


@pytest.mark.parametrize("seed", range(4))
def test_demands_hold_in_the_plan(seed):
    case = random_case(seed, Trait.HEAD, Trait.KINDS, num_layers=10, num_microbatches=6)
    rules = cut_rules(case.costs, together=[("layers.1", "layers.3")], first=["layers.6"], alone=["embedding", "head"])
    assert rules.allows(plan(case, rules=rules).partition)


def test_phases_that_may_not_change_do_not():
    case = random_case(7, Trait.HEAD, num_layers=16, num_microbatches=6)
    base = plan(case, phases=())
    assert base.placement.devices == (0, 1, 2, 3)
    assert [len(chunk) for chunk in base.partition.chunks] == [5, 4, 4, 5]
    assert plan(case, phases={"partition"}).placement.devices == (0, 1, 2, 3)
    placed = plan(case, phases={"placement"})
    assert placed.partition == even(case.costs, placed.placement.num_chunks)
    assert all(p.kind.value in ("F", "BW") for p in base.schedule.passes())
    assert plan(case).predicted.step_time <= base.predicted.step_time


@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("seed", range(3))
def test_the_reason_says_what_of_the_step_is_lost(seed, objective):
    """Shares are of the plan that comes out, positive, and add up; backwards that are faster whole are no gain of a phase."""
    case = random_case(seed, Trait.HEAD, Trait.KINDS, num_layers=12, num_microbatches=6)
    layers = tuple(replace(c, backward=0.8 * (c.backward_input + c.backward_weight)) for c in case.costs.layers)
    made = cooptimize(replace(case.costs, layers=layers), case.num_devices, 6, case.memory, effort=2, objective=objective)
    reason = made.planner.reason
    assert f"of the plan's {objective.value} is work that no plan avoids" in reason
    shares = [float(share) for share in re.findall(r"([-\d.]+)%", reason)]
    assert min(shares) > 0.0
    assert sum(shares) == pytest.approx(100.0, abs=0.25)


def test_the_reason_of_a_step_without_losses():
    costs = CostModel(tuple(LayerCost(str(i), 1.0, 1.0, 1.0, 1.0) for i in range(4)))
    assert cooptimize(costs, 2, 8).planner.reason.endswith("all of the plan's step_time is work that no plan avoids")


def test_a_budget_that_nothing_fits_names_the_smallest():
    with pytest.raises(InfeasibleBudget, match="smallest that fits"):
        cooptimize(random_case(0, Trait.SPREAD).costs, 4, 4, 0.02)


def test_too_few_items_are_refused():
    with pytest.raises(ValueError, match="30 devices need as many chunks, and the model has 26 items"):
        cooptimize(random_case(0, Trait.SPREAD).costs, 30, 4)
