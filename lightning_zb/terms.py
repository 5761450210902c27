"""What a new plan may change and must keep to, once layers have been measured."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zb.pipeline import Pipeline
from lightning_zb.plan_choice import Replan
from lightning_zb.planning.budget import MemoryBudget
from lightning_zb.planning.cooptimize.cut_rules import Constraints
from lightning_zb.profile_window import Profile

ENOUGH = 2.0
"""The budget beyond which a search gains next to nothing: twice what 1f1b holds, as zb-2p of the first paper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a new plan may change and must keep to, and when it is worth it.

    Args:
        replan: what may change.
        schedule: the name that was asked for; the plan file's own where a file was.
        budget: activation memory of each device.
        most: how much of the budget, as a multiple, a search may use; None for all of it.
        constraints: that cuts keep to.
        joins_ends: whether only placements with first and last chunk on one device will do.
        runs_ahead: whether devices begin a step before the others have ended the one before, so that the period counts
            instead of the makespan.
        min_gain: the share of a step's time that a new plan must save.
        seconds: for all of it but what an installation's first search compiles; schedules that search share what is left,
            and no further one is tried once it is over.
        must_fit: whether to refuse a budget that nothing fits, where anything may change; else what runs stays.
    """

    replan: Replan
    schedule: str
    budget: MemoryBudget = None
    most: float | None = None
    constraints: Constraints | None = None
    joins_ends: bool = False
    runs_ahead: bool = False
    min_gain: float = 0.01
    seconds: float = 10.0
    must_fit: bool = False


def make_terms(
    pipeline: Pipeline, profile: Profile, budget: MemoryBudget, replan: Replan, min_gain: float, seconds: float, is_first: bool
) -> Terms:
    """The terms of a plan that is to take the running one's place.

    Args:
        pipeline: what runs, with what the user asked for.
        profile: what was measured.
        budget: settled once it was, see `device_memory.settled_budget`.
        replan: see `Terms`, as for the next two.
        min_gain: share of a step's time.
        seconds: for planning.
        is_first: whether no plan with measured costs runs yet, so that a budget which nothing fits is refused.
    """
    request = pipeline.request
    return Terms(
        replan=replan,
        schedule=request.schedule,
        budget=budget,
        most=ENOUGH if request.memory_budget is None else None,
        constraints=request.constraints,
        joins_ends=profile.joins_ends,
        runs_ahead=pipeline.ending is not None and pipeline.ending.may_run_ahead,
        min_gain=min_gain,
        seconds=seconds,
        must_fit=request.memory_budget is not None and is_first,
    )
