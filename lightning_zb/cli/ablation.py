"""What each phase of co-optimisation gains, alone and together (the second paper's ablation study)."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from lightning_zb.cli.problem import value_of
from lightning_zb.cli.text import as_option, share, table, time_unit
from lightning_zb.planning.bounds import Objective
from lightning_zb.planning.budget import InfeasibleBudget, MemoryBudget
from lightning_zb.planning.cooptimize.optimize import cooptimize
from lightning_zb.planning.cooptimize.phases import Phase
from lightning_zb.planning.costs import CostModel
from lightning_zb.planning.plan import Plan


def ablation_table(
    costs: CostModel, num_devices: int, num_microbatches: int, budget: MemoryBudget, options: dict[str, Any]
) -> str:
    """Plans that fit every subset of the phases to the costs, and what they gain over the plan that fits none.

    What is not tuned stays as in 1f1b: layers cut evenly, one chunk a device, the backward whole.

    Args:
        costs: of the model.
        num_devices: P.
        num_microbatches: m.
        budget: as `make_plan` takes it.
        options: of the search, objective among them.
    """
    objective = Objective(options["objective"])
    rows: list[tuple[str, Plan | str]] = []
    for count in range(len(Phase) + 1):
        for phases in combinations(Phase, count):
            name = " + ".join(phase.value for phase in phases) or "none (1f1b)"
            try:
                rows.append((name, cooptimize(costs, num_devices, num_microbatches, budget, phases=phases, **options)))
            except InfeasibleBudget as error:
                rows.append((name, f"infeasible below {as_option(error.smallest)}"))
    plans = [plan for _, plan in rows if isinstance(plan, Plan)]
    plain = rows[0][1]
    second, time_name = time_unit(plan.predicted.makespan for plan in plans)
    header = ["phases tuned", f"{objective.value} ({time_name})", "gain", "bubble", "search (s)"]
    lines = []
    for name, plan in rows:
        if isinstance(plan, str):
            lines.append([name, plan, "-", "-", "-"])
            continue
        value = value_of(plan, objective)
        gain = f"{value_of(plain, objective) / value:.3f}" if isinstance(plain, Plan) and value > 0 else "-"
        figures = [f"{value / second:.2f}", gain, share(plan.predicted.bubble_rate), f"{plan.planner.seconds:.2f}"]
        lines.append([name, *figures])
    return table(header, lines)
