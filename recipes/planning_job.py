"""Planning without training: from a model or a costs file to plans, their predictions and their pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L

from lightning_zb.cli.comparison import Case, Entry, comparison_table
from lightning_zb.cli.problem import costs_for, strongest_bound
from lightning_zb.model.assumed_costs import assumed_costs
from lightning_zb.model.layers import find_layers
from lightning_zb.planning.bounds import Objective
from lightning_zb.planning.budget import InfeasibleBudget
from lightning_zb.planning.costs import CostModel
from lightning_zb.planning.plan import Plan
from lightning_zb.planning.planfile import write_costs, write_plan
from lightning_zb.planning.planner import make_plan
from lightning_zb.planning.registry import SearchSpec, find_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningJob:
    """What to plan, and where the results go.

    Args:
        model: whose layers are planned; its parameters need no values; unused where there is a costs file.
        costs: path of a costs file; None to assume costs from the model's parameter counts.
        layers: dotted path of the container that holds the layers; None to find it.
        devices: of the pipeline.
        microbatches: of a step.
        schedules: names.
        memory_budget: as ZeroBubbleStrategy takes it.
        partition: likewise.
        effort: how long schedules that search may search, see `lightning-zb plan --help`.
        folder: for a plan file and a picture of each schedule.
    """

    model: L.LightningModule | None = None
    costs: str | None
    layers: str | list[str] | None
    devices: int
    microbatches: int
    schedules: list[str]
    memory_budget: float | str | list[float | str] | None
    partition: str | list[int] | None
    effort: int
    folder: str

    def run(self) -> list[Plan]:
        """Plan every schedule, print the table, and write the files.

        Returns:
            The plans that fit the budget, the fastest first.

        Raises:
            InfeasibleBudget: none does.
        """
        costs = self._find_costs()
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_costs(costs, folder / "costs.json")
        plans: list[Plan] = []
        failures: list[InfeasibleBudget] = []
        for number, name in enumerate(self.schedules, 1):
            print(f"Planning {name} ({number} of {len(self.schedules)})", flush=True)
            options: dict[str, Any] = {"effort": self.effort} if isinstance(find_schedule(name), SearchSpec) else {}
            try:
                plan = make_plan(costs, self.devices, self.microbatches, name, self.memory_budget, self.partition, **options)
                plans.append(plan)
            except InfeasibleBudget as error:
                print(f"  {error}", flush=True)
                failures.append(error)
        if not plans:
            raise failures[0]
        plans.sort(key=lambda plan: plan.predicted.step_time)
        for plan in plans:
            _write(plan, folder)
        print(f"\n{self._table(plans)}")
        if self.costs is None:
            print(
                "Costs are assumed from parameter counts: times in arbitrary units, peaks in layers; bubbles and ratios hold."
            )
        print(f"Plan files, for strategy.schedule=FILE, are in {folder}", flush=True)
        return plans

    def _find_costs(self) -> CostModel:
        if self.costs is not None:
            return costs_for(Path(self.costs), self.devices)
        if self.model is None:
            raise ValueError("there is neither a model nor a costs file; write model=hybrid or costs=FILE")
        stack = find_layers(self.model, self.layers)
        return assumed_costs(self.model, stack.names, stack.modules)

    def _table(self, plans: Sequence[Plan]) -> str:
        objective = Objective.STEP_TIME
        case = Case("", plans[0].costs, self.microbatches, self.memory_budget, 1.0)
        entries = [Entry(plan.planner.name, case, plan, strongest_bound(plan, objective).seconds) for plan in plans]
        return comparison_table(entries, objective, several_cases=False)


def _write(plan: Plan, folder: Path) -> None:
    write_plan(plan, folder / f"{plan.planner.name}.json")
    if find_spec("matplotlib") is not None:
        from lightning_zb.report import timeline_picture  # an extra

        timeline_picture(plan, folder / f"{plan.planner.name}.png")
