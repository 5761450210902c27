"""Every bit equals the plain Trainer's: real processes over gloo, a pairwise subset of the full grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lightning import odd_plans
from tests.lightning.fitting import Case, differences, run
from tests.lightning.processes import run_cases

pytestmark = pytest.mark.distributed

_COMMON: dict[str, Any] = {"size": 36, "batch_size": 2, "accumulate": 4}


def _cases(num_ranks: int) -> list[Case]:
    """One launch runs them all: each schedule, each precision and each model feature meets P=2 and P=4."""

    def case(
        name: str, model: str, schedule: str, precision: str = "32-true", clip: float | None = None, **options: Any
    ) -> Case:
        changes = {k: options.pop(k) for k in ("accumulate", "size", "validate") if k in options}
        return Case(
            name, model, options, {"precision": precision, "gradient_clip_val": clip},
            strategy={"schedule": schedule}, devices=num_ranks, **{**_COMMON, **changes},
        )  # fmt: skip

    return [
        case("gpipe-sequential", "sequential", "gpipe", "bf16-mixed", frozen=2),
        case("1f1b-hybrid", "hybrid", "1f1b", validate=True),
        case("interleaved-tokens", "tokens", "interleaved", "bf16-mixed", clip=0.5, groups=True, raw_positions=True),
        case("zb-h1-hybrid", "hybrid", "zb-h1", "bf16-mixed", clip=0.5),
        case("zb-h2-tokens", "tokens", "zb-h2", frozen=3, twice=True),
        case("zb-v-hybrid", "hybrid", "zb-v", groups=True, clip=0.5, validate=True),
        case("zb-v-tied", "tokens", "zb-v", tied=True, clip=0.5),
        case("zb-v-bf16", "hybrid", "zb-v", "bf16-mixed"),
        case("configured-zb-h1", "configured", "zb-h1", size=16, family="nemotron_h"),  # too few layers for a V on four
        case("configured-1f1b", "configured", "1f1b", size=16, family="gpt2"),
        case("zb-v-few", "tokens", "zb-v", accumulate=1, size=16, raw_positions=True),
    ]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_processes(num_ranks: int, tmp_path: Path):
    shape = next(name for name in odd_plans.SHAPES if odd_plans.num_devices(name) == num_ranks)
    plan = odd_plans.write(shape, 4, tmp_path / "plan.json")
    odd = Case("odd", "tokens", strategy={"schedule": str(plan)}, devices=num_ranks, **{**_COMMON, "size": 16})
    cases = [*_cases(num_ranks), odd]
    results = run_cases(cases, num_ranks, tmp_path, seconds=300)
    found = {}
    for case in cases:
        parts = results[case.name]
        plain = run(case.plain(), tmp_path / "plain")
        found[case.name] = differences(parts, plain)
        total = plain["own_bytes"]
        assert all(part["own_bytes"] < total for part in parts), f"{case.name}: a rank holds the whole model"
        built = max(part["statistics"]["built_bytes"] for part in parts)
        assert built < total if case.model == "configured" else built == total, f"{case.name}: building took {built} bytes"
        # whole or split: a plan may change between the two, and steps that are measured do
        executed = [kind_count for part in parts for kind_count in part["statistics"]["passes"].items()]
        passes = sum(count * len(kind) for kind, count in executed)
        planned = 2 * len("FBW") * parts[0]["num_chunks"] * (case.size // case.batch_size)  # two epochs
        evaluated = 2 * 2 * parts[0]["num_chunks"] if case.validate else 0  # two epochs, two batches
        assert passes == planned + evaluated, f"{case.name}: passes differ from the plan's"
    assert all(not differences for differences in found.values()), found


@pytest.mark.slow
def test_odd_modules_and_batches(tmp_path: Path):
    """Adapters on a frozen model, batch normalisation and batches of other lengths, on real processes."""

    def case(name: str, model: str, schedule: str, shuffle: bool = True, **options: Any) -> Case:
        strategy = {"schedule": schedule}
        return Case(name, model, options, {"gradient_clip_val": 0.5}, strategy=strategy, devices=2, shuffle=shuffle, **_COMMON)

    cases = [
        *(case(f"adapted-{schedule}", "adapted", schedule) for schedule in ("zb-v", "1f1b", "zb-h1")),
        *(case(f"normalised-{schedule}", "tokens", schedule, batch_norm=True) for schedule in ("zb-v", "1f1b")),
        *(case(f"ragged-{schedule}", "ragged", schedule, shuffle=False) for schedule in ("zb-v", "zb-h2")),
    ]
    results = run_cases(cases, 2, tmp_path, seconds=200)
    found = {c.name: differences(results[c.name], run(c.plain(), tmp_path / "plain")) for c in cases}
    assert all(not differences for differences in found.values()), found
