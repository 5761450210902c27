"""Which plan a run starts with: read, or made from costs that are read or assumed; one plan for all processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, unique
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_zb.arguments import is_plan_file
from lightning_zb.model.assumed_costs import assumed_costs
from lightning_zb.model.layers import LayerStack
from lightning_zb.planning.budget import InfeasibleBudget, MemoryBudget, check_budget, format_bytes, parse_bytes, per_device
from lightning_zb.planning.compiling import is_compiled
from lightning_zb.planning.costs import CostModel
from lightning_zb.planning.partitioning import TooFewLayers
from lightning_zb.planning.plan import Plan
from lightning_zb.planning.planfile import read_costs, read_plan
from lightning_zb.planning.planner import make_plan
from lightning_zb.planning.registry import ScheduleSpec, SearchSpec, find_schedule

_File = TypeVar("_File")

_CAUTION = 0.5
"""Share of the memory budget to plan with before bytes are measured; assumed ones may be wrong by a factor."""
_SEARCH_SECONDS = 10.0
"""How long a schedule that searches may take at the start, while the other processes wait."""
_UNTIL_MEASURED = "zb-v"
"""What runs instead of a search that would begin again once layers are measured."""


@unique
class Replan(str, Enum):
    """What a new plan may change; each includes those before it."""

    OFF = "off"
    ORDER = "order"
    PARTITION = "partition"
    PLACEMENT = "placement"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What the user asked for; see `ZeroBubbleStrategy` for the first fields.

    Args:
        replan: what may change once layers are measured. If anything, the first plan must be safe rather than good; if
            everything, a search waits until then.
        halves_parameters: precision will make 16 bits of parameters and gradients that have 32 yet.
    """

    schedule: str
    memory_budget: Any
    partition: Any
    costs: str | Path | None
    constraints: Mapping[str, Any] | None = None
    replan: Replan = Replan.OFF
    halves_parameters: bool = False


@dataclass(frozen=True, slots=True)
class ChosenPlan:
    """A plan and the sentence that says why it runs."""

    plan: Plan
    announcement: str


def choose_plan(
    request: PlanRequest,
    module: nn.Module,
    stack: LayerStack,
    num_devices: int,
    num_microbatches: int,
    broadcast: Callable[[Any], Any],
    is_planner: bool,
) -> ChosenPlan:
    """Plan on one process and share the result, errors included, so that no process is left waiting.

    Args:
        request: what the user asked for.
        module: the LightningModule, whole.
        stack: its layers.
        num_devices: devices of the pipeline.
        num_microbatches: microbatches of a full step.
        broadcast: gives every process the planner's value.
        is_planner: whether this process plans.

    Raises:
        ValueError: on every process, the planner's one sentence.
    """
    outcome: ChosenPlan | ValueError | None = None
    if is_planner:
        if not is_compiled():
            rank_zero_info(
                "zero_bubble: compiling the planner's loops, once an installation, for up to a minute "
                "(`python -m lightning_zb.planning.compiling` does so beforehand)"
            )
        try:
            outcome = _choose(request, module, stack, num_devices, num_microbatches)
        except (ValueError, OSError) as error:
            outcome = (TooFewLayers if isinstance(error, TooFewLayers) else ValueError)(str(error))
    outcome = broadcast(outcome)
    if isinstance(outcome, ValueError):
        raise outcome
    assert outcome is not None
    return outcome


def _choose(request: PlanRequest, module: nn.Module, stack: LayerStack, num_devices: int, num_microbatches: int) -> ChosenPlan:
    if is_plan_file(request.schedule):
        plan = _read(read_plan, "schedule", request.schedule, "lightning-zb plan --out")
        _check_fits(plan, request.schedule, stack, num_devices, num_microbatches)
        return ChosenPlan(plan, _announce(plan, f"read from {request.schedule}"))
    check_budget(request.memory_budget, num_devices)
    _check_parameters_fit(request, module, num_devices)
    spec = find_schedule(request.schedule)
    sizes = num_devices, num_microbatches
    if request.costs is None and request.replan is Replan.PLACEMENT and isinstance(spec, SearchSpec):
        try:
            first = replace(request, schedule=_UNTIL_MEASURED)
            why = f"{request.schedule} plans once layers are measured"
            return _make(first, find_schedule(_UNTIL_MEASURED), module, stack, *sizes, why)
        except ValueError:  # too few layers, or too little memory: the search may find something all the same
            pass
    return _make(request, spec, module, stack, *sizes)


def _make(
    request: PlanRequest,
    spec: ScheduleSpec | SearchSpec,
    module: nn.Module,
    stack: LayerStack,
    num_devices: int,
    num_microbatches: int,
    why: str | None = None,
) -> ChosenPlan:
    budget, searches = request.memory_budget, isinstance(spec, SearchSpec)

    def make(costs: CostModel, budget: MemoryBudget) -> Plan:
        options: dict[str, Any] = {"seconds": _SEARCH_SECONDS} if searches else {}
        if request.constraints:
            options["constraints"] = request.constraints
        return make_plan(costs, num_devices, num_microbatches, request.schedule, budget, request.partition, **options)

    if request.costs is not None:
        measured = _read(read_costs, "costs", request.costs, "lightning-zb profile --out")
        chosen, source = make(measured, budget), f"costs from {request.costs}"
    else:
        costs, source = assumed_costs(module, stack.names, stack.modules), "costs assumed from parameter counts"
        if searches and budget is None:
            chosen = make(costs, 1.0)  # what is left is known once bytes are
        elif spec.own_budget is None and (needs_bytes(budget) or (request.replan is not Replan.OFF and budget is not None)):
            chosen = _cautious(partial(make, costs), budget)
            source += f", memory_budget={budget!r} counts in full once layers are measured"
        else:
            chosen = make(costs, budget)
    reason = f"{why or chosen.planner.reason}; {source}; planned in {chosen.planner.seconds:.1f} s"
    return ChosenPlan(chosen, _announce(chosen, reason, is_provisional=why is not None))


def _cautious(make: Callable[[MemoryBudget], Plan], budget: Any) -> Plan:
    """A first plan that keeps clear of a budget although bytes are only assumed.

    Args:
        make: makes the plan of a budget.
        budget: what was asked for; where it is a size, nothing is known of how many activations fit into it.

    Raises:
        ValueError: nothing fits the budget, by the bytes that are assumed.
    """
    entries = list(budget) if isinstance(budget, (list, tuple)) else [budget]
    shares = [_CAUTION * (1.0 if isinstance(entry, str) else entry) for entry in entries]
    try:
        return make(shares if isinstance(budget, (list, tuple)) else shares[0])
    except InfeasibleBudget as error:
        if not needs_bytes(budget):
            make(budget)
        return make(error.smallest)


def _check_parameters_fit(request: PlanRequest, module: nn.Module, num_devices: int) -> None:
    """Refuse sizes of whole devices that cannot even hold parameters and gradients: that is known before anything runs.

    Raises:
        ValueError: together they are too small, however the model is cut.
    """
    budget = request.memory_budget
    sizes = [size for size in per_device(budget, num_devices) if isinstance(size, str)]
    if len(sizes) < num_devices:
        return
    most = 2 if request.halves_parameters else 8
    least = sum(p.numel() * min(p.element_size(), most) * (2 if p.requires_grad else 1) for p in module.parameters())
    if least > sum(map(parse_bytes, sizes)):
        each = math.ceil(least / num_devices / 2**20)
        raise ValueError(
            f"memory_budget={budget!r} does not fit: parameters and gradients alone take {format_bytes(least)} on "
            f"all {num_devices} devices together; write more than '{each}MiB' for each"
        )


def _read(read: Callable[[str | Path], _File], argument: str, path: str | Path, command: str) -> _File:
    """Read a file that an argument of the strategy names.

    Raises:
        ValueError: it cannot be read; one sentence.
    """
    try:
        return read(path)
    except OSError as error:
        reason = f"{argument}={str(path)!r} cannot be read ({error.strerror}); write the path of a file that {command} made"
        raise ValueError(reason) from error


def needs_bytes(budget: Any) -> bool:
    """Whether a memory budget names bytes (`"40GiB"`), which assumed costs do not know."""
    return isinstance(budget, str) or (isinstance(budget, (list, tuple)) and any(isinstance(b, str) for b in budget))


def _check_fits(plan: Plan, path: str, stack: LayerStack, num_devices: int, num_microbatches: int) -> None:
    wanted = (num_devices, len(stack) + 2)
    if (plan.num_devices, plan.partition.num_layers) != wanted:
        raise ValueError(
            f"{path} plans {plan.partition.num_layers} items (prologue, layers, epilogue) on {plan.num_devices} devices, "
            f"but this run has {wanted[1]} items on {wanted[0]}; make a plan for it with lightning-zb plan"
        )
    if plan.num_microbatches < num_microbatches:
        raise ValueError(
            f"{path} orders {plan.num_microbatches} microbatches, but accumulate_grad_batches is {num_microbatches}; "
            f"make a plan with --microbatches {num_microbatches}"
        )


def _announce(plan: Plan, why: str, is_provisional: bool = False) -> str:
    """One line: which plan runs, why, and what it gains over 1f1b; a provisional one has nothing to be compared by."""
    predicted = plan.predicted
    chunks = plan.placement.num_chunks
    line = (
        f"zero_bubble: {plan.planner.name} on {plan.num_devices} devices, {chunks} chunks, "
        f"{plan.num_microbatches} microbatches; predicted bubble {100 * predicted.bubble_rate:.1f} %"
    )
    baseline = None if is_provisional or plan.planner.name == "1f1b" else _one_f_one_b(plan)
    if baseline is not None:
        gain = baseline.predicted.step_time / predicted.step_time
        line += f", {gain:.2f}x the speed of 1f1b ({100 * baseline.predicted.bubble_rate:.1f} %)"
    return f"{line}; {why}"


def _one_f_one_b(plan: Plan) -> Plan | None:
    """1f1b for the same costs; None where it cannot run (fewer layers than devices)."""
    try:
        return make_plan(plan.costs, plan.num_devices, plan.num_microbatches, "1f1b")
    except ValueError:
        return None
