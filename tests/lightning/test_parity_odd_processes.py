"""Every bit equals the plain Trainer's on plans of odd shapes, in real processes over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_zb.planning.cooptimize import cooptimize
from lightning_zb.planning.planfile import read_plan, write_plan
from tests.lightning import odd_plans
from tests.lightning.fitting import Case, differences, run
from tests.lightning.processes import run_cases

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def _plans(num_ranks: int, directory: Path) -> dict[str, Path]:
    """Every shape of so many devices, and what the co-optimizer makes of the same layers within two budgets."""
    shapes = [shape for shape in odd_plans.SHAPES if odd_plans.num_devices(shape) == num_ranks]
    found = {shape: odd_plans.write(shape, 4, directory / f"{i}.json") for i, shape in enumerate(shapes)}
    costs = read_plan(found[shapes[0]]).costs
    for budget in (1.0, 2.0):
        path = found[f"auto within {budget}"] = directory / f"auto-{budget}.json"
        write_plan(cooptimize(costs, num_ranks, 4, budget, effort=2), path)
    return found


def _cases(plans: dict[str, Path], num_ranks: int) -> list[Case]:
    """Each plan with two models, and with what else may go wrong: mixed precision, clipping, tied ends, a step cut short."""

    def case(name: str, model: str, path: Path, size: int = 16, trainer: dict[str, Any] | None = None, **options: Any) -> Case:
        return Case(name, model, options, trainer or {}, {"schedule": str(path)}, devices=num_ranks, size=size, batch_size=2)

    cases = []
    for name, path in plans.items():
        cases += [
            case(f"{name}, tokens", "tokens", path, size=20),  # the last step has two microbatches
            case(f"{name}, hybrid, bf16", "hybrid", path, trainer={"precision": "bf16-mixed"}),
            case(f"{name}, tied, clipped", "tokens", path, trainer={"gradient_clip_val": 0.5}, tied=True),
        ]
    return cases


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_odd_plans_in_processes(num_ranks: int, tmp_path: Path):
    plans = _plans(num_ranks, tmp_path)
    cases = _cases(plans, num_ranks)
    results = run_cases(cases, num_ranks, tmp_path, seconds=280)
    found = {}
    for case in cases:
        parts = results[case.name]
        found[case.name] = differences(parts, run(case.plain(), tmp_path / "plain"))
        placement = read_plan(case.strategy["schedule"]).placement  # type: ignore[index]
        assert [part["num_chunks"] for part in parts] == [placement.num_chunks] * num_ranks
    assert not any(found.values()), found
