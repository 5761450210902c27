"""What `ZeroBubbleCallback` writes into checkpoints, in plain numbers and texts: a resumed run starts where it stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_zb.model.layer_costs import ItemProfile
from lightning_zb.plan_choice import PlanRequest
from lightning_zb.planning.plan import Plan
from lightning_zb.planning.planfile import plan_from_json, plan_to_json
from lightning_zb.profile_window import Profile
from lightning_zb.replanning import LoggedDecision


@dataclass(frozen=True, slots=True)
class CallbackState:
    """What is known after layers were measured.

    Args:
        plan: in force, with measured costs.
        request: what the user asked for when it was made.
        profile: what was measured last, without its timeline; None on other ranks than 0.
        decisions: so far.
        num_drifts: so far.
    """

    plan: Plan
    request: dict[str, Any]
    profile: Profile | None
    decisions: tuple[LoggedDecision, ...]
    num_drifts: int


def request_values(request: PlanRequest) -> dict[str, Any]:
    """The part of a request that a plan in force must have been made for, in plain values."""
    values = {"schedule": request.schedule, "memory_budget": request.memory_budget, "partition": request.partition}
    if request.constraints:
        values["constraints"] = {name: [*items] for name, items in request.constraints.items()}
    return {key: list(v) if isinstance(v, Sequence) and not isinstance(v, str) else v for key, v in values.items()}


def to_plain(state: CallbackState) -> dict[str, Any]:
    """The state as lists, dicts, numbers and texts, which any checkpoint format can hold."""
    return {
        "plan": plan_to_json(state.plan),
        "request": state.request,
        "profile": None if state.profile is None else _profile_to_plain(state.profile),
        "decisions": [asdict(decision) for decision in state.decisions],
        "num_drifts": state.num_drifts,
    }


def from_plain(data: Mapping[str, Any]) -> CallbackState:
    """The state that `to_plain` made plain.

    Raises:
        ValueError: the plan cannot be read; the message names the field.
    """
    plan = plan_from_json(data["plan"])
    return CallbackState(
        plan,
        dict(data["request"]),
        None if data["profile"] is None else _profile_from_plain(data["profile"], plan),
        tuple(LoggedDecision(**decision) for decision in data["decisions"]),
        data["num_drifts"],
    )


def read_state(data: Mapping[str, Any]) -> CallbackState | None:
    """The state in a checkpoint; None where it has none, or one that cannot be read, which training does not need."""
    if not data:
        return None
    try:
        return from_plain(data)
    except (ValueError, KeyError, TypeError) as error:  # of another version
        rank_zero_warn(f"the checkpoint's plan cannot be read ({error}); layers are measured again")
        return None


def why_not(plan: Plan, state: CallbackState, request: PlanRequest) -> str | None:
    """Why a run cannot start with a checkpoint's plan, in words; None where it can.

    Args:
        plan: what this run would start with otherwise.
        state: from the checkpoint.
        request: what this run was asked for.
    """
    saved = state.plan
    if request_values(request) != state.request:
        return f"was made for {state.request}, now {request_values(request)} is asked for"
    if (saved.num_devices, saved.num_microbatches) != (plan.num_devices, plan.num_microbatches):
        return (
            f"is for {saved.num_devices} devices and {saved.num_microbatches} microbatches, "
            f"this run has {plan.num_devices} and {plan.num_microbatches}"
        )
    names = [[layer.name for layer in p.costs.layers] for p in (saved, plan)]
    return None if names[0] == names[1] else "is for other layers"


def _profile_to_plain(profile: Profile) -> dict[str, Any]:
    return {
        "peak_bytes": list(profile.peak_bytes),
        "joins_ends": profile.joins_ends,
        "pass_seconds": [[chunk, part, seconds] for (chunk, part), seconds in profile.pass_seconds.items()],
        "spread": [[item.index, *item.high, item.num_samples, item.movable, list(item.whole)] for item in profile.items],
    }


def _profile_from_plain(data: Mapping[str, Any], plan: Plan) -> Profile:
    """The profile, its layers with the costs of the plan."""
    return Profile(
        costs=plan.costs,
        items=tuple(_item_from_plain(row, plan) for row in data["spread"]),
        timeline=None,
        pass_seconds={(chunk, part): seconds for chunk, part, seconds in data["pass_seconds"]},
        running_seconds={},
        peak_bytes=tuple(data["peak_bytes"]),
        joins_ends=data["joins_ends"],
    )


def _item_from_plain(row: Sequence[Any], plan: Plan) -> ItemProfile:
    index, forward, backward, weight, number, *more = row  # the last two are missing in what earlier versions wrote
    movable, whole = more or (None, ())
    return ItemProfile(index, plan.costs.layers[index], (forward, backward, weight), number, movable, tuple(whole))
