"""Optimistic steps under Lightning: every bit equals the plain Trainer's, and rollbacks really happen."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zb.execution.statistics import DEVICE_COUNTERS, STEP_COUNTERS
from tests.lightning.fitting import Case, differences, run
from tests.lightning.processes import run_cases
from tests.lightning.test_checkpoints import checkpoint_differences

pytestmark = pytest.mark.distributed


def _case(name: str, num_ranks: int, clip: float, *, mode: str = "exact", **changes: Any) -> Case:
    strategy = {"post_validation": mode, "memory_budget": 2.0, **changes.pop("strategy", {})}
    trainer = {"gradient_clip_val": clip, "max_epochs": 3, **changes.pop("trainer", {})}
    options = {"groups": True, "lr": 3e-2, **changes.pop("model_options", {})}
    settings = {"size": 44, "batch_size": 2, "accumulate": 8, **changes}
    return Case(name, "tokens", options, trainer, strategy, devices=num_ranks, **settings)


BF16 = {"precision": "bf16-mixed"}
RICH = {"batch_norm": True, "warmup": True}
# what losses are multiplied with, step by step: Adam does not mind, clipping does
PATTERNS = {
    "first": (*(4.0,) * 4, *(0.05,) * 20),
    "alternating": (1.1, 0.05),
    "random": (1.3, 0.3, 0.9, 1.5, 0.2, 1.2, 0.7, 1.4, 1.1, 0.1, 0.8, 1.0, 0.4, 1.25),
}


def _quick_cases() -> list[Case]:
    random = {**RICH, "scales": PATTERNS["random"]}
    return [
        _case("never", 2, 1e3, count_collectives=True),
        _case("always", 2, 0.1, callback={"profile_steps": (1, 3), "replan": "off"}),
        _case("random", 2, 1.0, model_options=random, validate=True, watch=True),
        _case("random-bf16", 2, 1.0, model_options=random, trainer=BF16),
        _case("some-1f1b", 2, 1.0, strategy={"schedule": "1f1b", "memory_budget": None}),
        _case("some-tied", 2, 1.0, model_options={"tied": True}),
        _case(
            "auto",
            2,
            1.0,
            mode="auto",
            strategy={"schedule": "zb-2p", "memory_budget": None},
            model_options={"scales": (*(0.05,) * 9, 1.1, 0.9)},
            trainer={"max_epochs": 5},
        ),
        *_unlike_plain(2),
    ]


def _unlike_plain(num_ranks: int) -> list[Case]:
    """What has other bits than the plain Trainer: compared with the synchronous run of the same pipeline."""
    special = {
        "nan": {"poisoned_step": 2},
        "inf": {"overflowing_steps": (1, 5, 6), "scales": PATTERNS["random"]},
        "dropout": {"dropout": 0.2, "scales": PATTERNS["random"]},
    }
    return [
        _case(name if mode == "exact" else f"{name}-off", num_ranks, 1.0, mode=mode, model_options=options)
        for name, options in special.items()
        for mode in ("exact", "off")
    ]


def _all_cases(num_ranks: int) -> list[Case]:
    patterns = {"never": ((0.01, 0.1), 1e3), "always": ((1.0, 3.0), 0.1), **{n: (p, 1.0) for n, p in PATTERNS.items()}}
    by_pattern = [
        _case(f"{name}{'-bf16' * bool(trainer)}", num_ranks, clip, model_options={**RICH, "scales": scales}, trainer=trainer)
        for name, (scales, clip) in patterns.items()
        for trainer in ({}, BF16)
    ]
    schedules = ("1f1b", "interleaved", "zb", "zb-2p", "v-half", "gpipe")
    by_schedule = [
        _case(
            f"random-{schedule}",
            num_ranks,
            1.0,
            strategy={"schedule": schedule, "memory_budget": None},
            model_options={**RICH, "scales": PATTERNS["random"]},
            watch=True,
            validate=True,
        )
        for schedule in schedules
    ]
    hybrid = _case("hybrid", num_ranks, 1.0, model_options={"scales": PATTERNS["random"]}, trainer={"max_epochs": 2})
    return [*by_pattern, *by_schedule, replace(hybrid, model="hybrid"), _replanned(num_ranks), *_unlike_plain(num_ranks)]


def _replanned(num_ranks: int) -> Case:
    """By the first plan devices cannot run out of step, by the second they can."""
    strategy, callback = {"schedule": "zb-v", "memory_budget": 0.5}, {"profile_steps": None}
    changes = {"strategy": strategy, "callback": callback, "trainer": {"max_epochs": 6}}
    return _case("auto-replanned", num_ranks, 1e3, mode="auto", gains_after=2, **changes)


def _total(results: list[dict[str, Any]], counter: str) -> int:
    return sum(r["statistics"][counter] for r in results)


def _check(cases: list[Case], num_ranks: int, directory: Path, seconds: float) -> dict[str, list[dict[str, Any]]]:
    """Run the cases; every bit must be the plain Trainer's, or the synchronous run's where those differ."""
    results = run_cases(cases, num_ranks, directory, seconds=seconds)
    found = {}
    for case in cases:
        if f"{case.name}-off" in results:
            found[case.name] = differences(results[case.name], _merge(results[f"{case.name}-off"]))
        elif not case.name.endswith("-off"):
            found[case.name] = differences(results[case.name], run(case.plain(), directory / "plain"))
        print(case.name, {c: n for c in STEP_COUNTERS if (n := _total(results[case.name], c))})
    assert all(not differences for differences in found.values()), found
    for name, skips in (("nan", 1), ("inf", 3)):
        assert all(torch.isfinite(w).all() for w in _merge(results[name])["weights"].values())
        assert _total(results[name], "skips") == _total(results[f"{name}-off"], "skips") == skips * num_ranks
    assert _total(results["never"], "optimistic_steps") > 0
    assert _total(results["never"], "rollbacks") == _total(results["never"], "redone_forwards") == 0
    assert _total(results["always"], "rollbacks") + _total(results["always"], "holds") > 0
    for name in results:
        if name.startswith(("random", "some-tied", "dropout", "alternating")) and not name.endswith("-off"):
            assert _total(results[name], "rollbacks") > 0, name
    return results


def test_optimistic_steps_keep_every_bit(tmp_path: Path):
    results = _check(_quick_cases(), 2, tmp_path, seconds=400)
    assert _total(results["auto"], "switches") > 0
    for result in results["never"]:  # three steps an epoch: metrics are shared between epochs, data compared in two steps
        counts = result["collectives"]
        assert [counts[step] - counts[step - 1] for step in (2, 4, 5, 7, 8)] == [0] * 5
    assert len(results["random"][0]["seen"]) == 7  # validation and epoch end of three epochs, and the end
    _check_reports(results, tmp_path / "rank0")


def _check_reports(results: dict[str, list[dict[str, Any]]], directory: Path) -> None:
    """What loggers and the run's summary say of optimizer steps is what was counted."""
    rows = csv.DictReader((directory / "random" / "metrics.csv").read_text().splitlines())
    logged = [row for row in rows if row["zb/rollbacks"]]
    assert [row["zb/optimistic_steps"] for row in logged] == sorted(row["zb/optimistic_steps"] for row in logged)
    assert float(logged[-1]["zb/rollbacks"]) > 0
    for counter in DEVICE_COUNTERS:  # of both devices; the last two steps are not yet in it
        assert (
            _total(results["random"], counter) - 4 <= float(logged[-1][f"zb/{counter}"]) <= _total(results["random"], counter)
        )
    summary = (directory / "always" / "zero_bubble" / "summary.md").read_text()
    table = summary.split("## Optimizer steps\n\n")[1].split("\n\n")[0].splitlines()
    assert table[0] == f"| device | {' | '.join(c.replace('_', ' ') for c in STEP_COUNTERS)} |"
    by_device = {r["devices"]: [str(r["statistics"][c]) for c in STEP_COUNTERS] for r in results["always"]}
    assert table[2:] == [f"| {device} | {' | '.join(counts)} |" for (device,), counts in sorted(by_device.items())]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_clip_pattern_and_schedule(num_ranks: int, tmp_path: Path):
    results = _check(_all_cases(num_ranks), num_ranks, tmp_path, seconds=550)
    assert _total(results["auto-replanned"], "optimistic_steps") > 0


@pytest.mark.slow
def test_a_new_plan_lets_auto_be_optimistic(tmp_path: Path):
    case = _replanned(2)
    results = run_cases([case], 2, tmp_path)[case.name]
    assert differences(results, run(case.plain(), tmp_path / "plain")) == []
    assert _total(results, "optimistic_steps") > 0


def _merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The results of all ranks as those of one process."""
    whole = dict(parts[0])
    whole["weights"] = {k: v for part in parts for k, v in part["weights"].items()}
    whole["optimizer"] = {k: v for part in parts for k, v in part["optimizer"].items()}
    return whole


def test_a_checkpoint_between_steps_is_validated_and_resumes(tmp_path: Path):
    """Saved in the middle of an epoch with a step pending; resumed by two processes, as the plain Trainer would."""
    options = {"shuffle": False, "model_options": {"scales": PATTERNS["random"], "warmup": True}}
    paths = {name: str(tmp_path / f"{name}.ckpt") for name in ("ours", "plain")}
    saving = [_case(f"saving-{step}", 2, 1.0, checkpoint=(step, f"{paths['ours']}{step}"), **options) for step in (1, 2)]
    resuming = [_case(f"resuming-{step}", 2, 1.0, resume=f"{paths['ours']}{step}", **options) for step in (1, 2)]
    results = run_cases([*saving, *resuming], 2, tmp_path)
    for step, first, second in zip((1, 2), saving, resuming, strict=True):
        assert any(r["was_pending"] for r in results[first.name])
        plain = replace(first.plain(), checkpoint=(step, f"{paths['plain']}{step}"))
        assert differences(results[first.name], run(plain, tmp_path / "plain")) == []
        saved = [torch.load(f"{path}{step}", weights_only=False) for path in (paths["ours"], paths["plain"])]
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
            assert checkpoint_differences(saved[0][key], saved[1][key], key) == []
        resumed = run(replace(second.plain(), resume=f"{paths['plain']}{step}"), tmp_path / "plain")
        assert differences(results[second.name], resumed) == []


@pytest.mark.parametrize("mode", ["exact", "off"])
def test_all_ranks_raise_where_a_norm_is_not_finite(mode: str, tmp_path: Path):
    """One device's gradient overflows in the third step; every rank has the weights of two steps, also in its callbacks."""
    strategy = {"error_if_nonfinite": True}
    case = _case(
        "raises", 2, 1.0, mode=mode, strategy=strategy, model_options={"overflowing_steps": (2,)}, raises=True, watch=True
    )
    results = run_cases([case], 2, tmp_path)["raises"]
    plain = run(
        replace(case.plain(), trainer={**case.trainer, "max_epochs": -1, "max_steps": 2}, raises=False), tmp_path / "plain"
    )
    for result in results:
        assert result["error"] is not None
        assert "the gradient norm is inf; no device has stepped" in result["error"]
        assert result["seen"][-1][0] == "exception"
        for weights in (result["weights"], result["seen"][-1][2]):
            assert all(torch.equal(w, plain["weights"][n]) for n, w in weights.items())


@pytest.mark.slow
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
