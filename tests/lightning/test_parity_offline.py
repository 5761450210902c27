"""Every bit equals the plain Trainer's: all devices of a pipeline in one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.lightning.fitting import Case, differences, run

BUILDERS = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"]
PRECISIONS = ["32-true", "bf16-mixed"]


@cache
def _plain(key: str) -> dict[str, Any]:
    """Plain runs are shared between the cases that need the same one."""
    with TemporaryDirectory() as directory:
        return run(_plain_cases[key], Path(directory))


_plain_cases: dict[str, Case] = {}


def _check(case: Case, tmp_path: Path) -> dict[str, Any]:
    plain = Case(**{**case.__dict__, "name": "run", "strategy": None, "devices": 1})
    key = repr(plain)
    _plain_cases[key] = plain
    result = run(Case(**{**case.__dict__, "name": "run"}), tmp_path)
    assert differences([result], _plain(key)) == []
    return result


def _case(model: str, schedule: str, num_devices: int, precision: str = "32-true", **changes: Any) -> Case:
    options = {"schedule": schedule, "virtual_devices": num_devices, **changes.pop("strategy", {})}
    trainer = {"precision": precision, **changes.pop("trainer", {})}
    return Case("run", model, strategy=options, trainer=trainer, **{"size": 36, "batch_size": 2, "accumulate": 4, **changes})


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num_devices", [1, 2, 4])
@pytest.mark.parametrize("schedule", BUILDERS)
@pytest.mark.parametrize("model", ["sequential", "hybrid"])
def test_every_schedule(model, schedule, num_devices, precision, tmp_path):
    """18 microbatch groups in two epochs, the last of each shorter: 10 optimizer steps."""
    result = _check(_case(model, schedule, num_devices, precision), tmp_path)
    assert result["steps"] == 10
    executed = result["statistics"]["passes"]
    assert sum(executed.values()) == 2 * result["plan_passes"] * 4 + 2 * result["plan_passes"] // 4 * 2
