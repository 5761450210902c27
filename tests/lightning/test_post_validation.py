"""Optimistic steps under Lightning: every bit equals the plain Trainer's, and rollbacks really happen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning.fitting import Case, differences, run
from tests.lightning.processes import run_cases

pytestmark = pytest.mark.distributed


def _case(name: str, num_ranks: int, clip: float, *, mode: str = "exact", **changes: Any) -> Case:
    strategy = {"post_validation": mode, "memory_budget": 2.0, **changes.pop("strategy", {})}
    trainer = {"gradient_clip_val": clip, "max_epochs": 3, **changes.pop("trainer", {})}
    options = {"groups": True, "lr": 3e-2, **changes.pop("model_options", {})}
    settings = {"size": 44, "batch_size": 2, "accumulate": 8, **changes}
    return Case(name, "tokens", options, trainer, strategy, num_ranks, **settings)


def _cases(num_ranks: int) -> list[Case]:
    bf16 = {"precision": "bf16-mixed"}
    return [
        _case("never", num_ranks, 1e3),
        _case("always", num_ranks, 0.1),
        _case("some", num_ranks, 1.0),
        _case("some-bf16", num_ranks, 1.0, trainer=bf16),
        _case("some-validated", num_ranks, 1.0, validate=True),
        _case("some-1f1b", num_ranks, 1.0, strategy={"schedule": "1f1b", "memory_budget": None}),
        _case("some-tied", num_ranks, 1.0, model_options={"tied": True}),
        _case("auto", num_ranks, 1.3, mode="auto", trainer={"max_epochs": 8}),
        _case("nan", num_ranks, 1.0, model_options={"poisoned_step": 2}),
        _case("nan-off", num_ranks, 1.0, mode="off", model_options={"poisoned_step": 2}),
        _case("dropout", num_ranks, 1.0, model_options={"dropout": 0.2}),
        _case("dropout-off", num_ranks, 1.0, mode="off", model_options={"dropout": 0.2}),
    ]


def _total(results: list[dict[str, Any]], counter: str) -> int:
    return sum(r["statistics"][counter] for r in results)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_optimistic_steps_keep_every_bit(num_ranks: int, tmp_path: Path):
    cases = _cases(num_ranks)
    results = run_cases(cases, num_ranks, tmp_path, seconds=400)
    found = {}
    for case in cases:
        if case.name.startswith(("dropout", "nan")):  # compared with the synchronous run below
            continue
        plain = run(case.plain(), tmp_path / "plain")
        found[case.name] = differences(results[case.name], plain)
    for name in ("dropout", "nan"):
        found[name] = differences(results[name], _merge(results[f"{name}-off"]))
    assert all(not differences for differences in found.values()), found
    assert all(torch.isfinite(w).all() for w in _merge(results["nan"])["weights"].values())
    assert _total(results["nan"], "skips") == _total(results["nan-off"], "skips") == num_ranks
    assert _total(results["never"], "optimistic_steps") > 0
    assert _total(results["never"], "rollbacks") == _total(results["never"], "redone_forwards") == 0
    assert _total(results["always"], "rollbacks") + _total(results["always"], "holds") > 0
    assert all(
        _total(results[name], "rollbacks") > 0 for name in ("some", "some-bf16", "some-validated", "some-tied", "dropout")
    )


def _merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The results of all ranks as those of one process."""
    whole = dict(parts[0])
    whole["weights"] = {k: v for part in parts for k, v in part["weights"].items()}
    whole["optimizer"] = {k: v for part in parts for k, v in part["optimizer"].items()}
    return whole


def test_inplace_rollback_stays_close(tmp_path: Path):
    """Not bitwise: the error is measured and bounded."""
    options = {"trainer": {"max_epochs": 12}, "model_options": {"lr": 1e-3}}
    cases = [_case(mode, 2, 1.6, mode=mode, **options) for mode in ("inplace", "off")]
    results = run_cases(cases, 2, tmp_path, seconds=240)
    assert _total(results["inplace"], "rollbacks") > 0
    exact = _merge(results["off"])["weights"]
    worst = max(float((w - exact[n]).abs().max()) for n, w in _merge(results["inplace"])["weights"].items())
    print(f"in-place rollback: {_total(results['inplace'], 'rollbacks')} rollbacks, worst weight error {worst:.1e}")
    assert worst < 1e-4
    assert torch.isfinite(torch.tensor(worst))
