"""16-mixed: the loss scale of all devices moves as in one process, and every bit equals the plain Trainer's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lightning.fitting import Case, differences, run
from tests.lightning.processes import run_cases

# the first scale overflows float16 in several layers, the growth every third step overflows again, and step 5 in one layer
SCALER = {"init_scale": 2.0**24, "growth_interval": 3, "growth_factor": 4.0}
OPTIONS = {"groups": True, "lr": 1e-2, "overflowing_steps": (5, 13)}


def _case(name: str, strategy: dict[str, Any] | None, clip: float | None = None, **changes: Any) -> Case:
    trainer = {"max_epochs": 3, "gradient_clip_val": clip, **changes.pop("trainer", {})}
    shape = {"size": 44, "batch_size": 2, "accumulate": 4, "shuffle": False}
    settings = {**shape, "scaler": SCALER, "model_options": OPTIONS, **changes}
    return Case(name, "tokens", trainer=trainer, strategy=strategy, devices=1, **settings)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_one_process(clip, tmp_path):
    plain = run(_case("plain", None, clip), tmp_path)
    pipelined = run(_case("virtual", {"virtual_devices": 2}, clip), tmp_path)
    assert differences([pipelined], plain) == []
    assert pipelined["statistics"]["skips"] > 5


def _processes(num_ranks: int) -> list[Case]:
    scales = {**OPTIONS, "scales": (0.1, 1.0, 3.0, 0.1, 2.0)}
    modes = {
        "off": _case("off", {"post_validation": "off"}),
        "off-clip": _case("off-clip", {"post_validation": "off"}, 1.0),
        "exact": _case("exact", {"post_validation": "exact"}),
        "exact-clip": _case("exact-clip", {"post_validation": "exact"}, 1.0, model_options=scales),
        "exact-value": _case("exact-value", {"post_validation": "exact"}, 0.01, trainer={"gradient_clip_algorithm": "value"}),
        "auto-1f1b": _case("auto-1f1b", {"post_validation": "auto", "schedule": "1f1b"}, 1.0),
    }
    return [Case(**{**case.__dict__, "devices": num_ranks}) for case in modes.values()]


@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes(num_ranks, tmp_path):
    cases = _processes(num_ranks)
    cases = cases if num_ranks == 4 else [c for c in cases if c.name in ("off-clip", "exact", "exact-clip")]
    results = run_cases(cases, num_ranks, tmp_path, seconds=400)
    found = {case.name: differences(results[case.name], run(case.plain(), tmp_path / "plain")) for case in cases}
    assert all(not differences for differences in found.values()), found
    for case in cases:
        counters = {k: sum(r["statistics"][k] for r in results[case.name]) for k in ("skips", "rollbacks", "holds")}
        print(case.name, counters, results[case.name][0]["scaler"])
        assert counters["skips"] > 5 * num_ranks
        assert case.name.startswith(("off", "auto")) or counters["holds"] > 0
        assert case.name != "exact-clip" or counters["rollbacks"] > 0


@pytest.mark.distributed
def test_resumed_runs_keep_the_scale(tmp_path):
    """Plain, then two processes with the next step pending when the checkpoint is due, then plain again."""
    paths = [str(tmp_path / f"{n}.ckpt") for n in range(2)]
    run(_case("first", None, 1.0, trainer={"max_epochs": 1}, save=paths[0]), tmp_path)
    middle = _case("middle", {"post_validation": "exact"}, 1.0, trainer={"max_epochs": 2}, resume=paths[0], save=paths[1])
    results = run_cases([Case(**{**middle.__dict__, "devices": 2})], 2, tmp_path)
    last = run(_case("last", None, 1.0, resume=paths[1]), tmp_path)
    whole = run(_case("whole", None, 1.0, save=str(tmp_path / "whole.ckpt")), tmp_path)
    last["log"], last["rates"] = whole["log"], whole["rates"]  # of the last epoch only
    assert differences([last], whole) == []
    saved = [torch.load(path, weights_only=False)["MixedPrecision"] for path in (paths[1], tmp_path / "whole.ckpt")]
    assert saved[0].keys() == saved[1].keys()
    assert sum(r["statistics"]["optimistic_steps"] + r["statistics"]["holds"] for r in results["middle"]) > 0
