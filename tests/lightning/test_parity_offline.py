"""Every bit equals the plain Trainer's: all devices of a pipeline in one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from lightning_zb.planning.costs import CostModel, LayerCost, LayerRole, Link
from lightning_zb.planning.planfile import write_costs
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
    plain = case.plain()
    key = repr(plain)
    _plain_cases[key] = plain
    result = run(case, tmp_path)
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


FEATURES: dict[str, dict[str, Any]] = {
    "frozen first layers": {"model_options": {"frozen": 3}},
    "frozen first chunk": {"model_options": {"frozen": 5}, "strategy": {"schedule": "1f1b"}},
    "tied on a V": {"model_options": {"tied": True}},
    "tied on two devices": {"model_options": {"tied": True}, "strategy": {"schedule": "zb-h1"}},
    "head reads the embedding": {"model_options": {"functional_head": True}},
    "head reads the embedding on another device": {
        "model_options": {"functional_head": True},
        "strategy": {"schedule": "1f1b"},
    },
    "layer used twice": {"model_options": {"twice": True}},
    "raw parameters": {"model_options": {"raw_positions": True}},
    "two groups and clipping": {"model_options": {"groups": True}, "trainer": {"gradient_clip_val": 0.5}},
    "clipping by value": {"trainer": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}},
    "fewer microbatches than devices": {"accumulate": 3, "strategy": {"virtual_devices": 4}},
    "one microbatch": {"accumulate": 1, "size": 16},
    "validation": {"validate": True},
    "bf16-true": {"trainer": {"precision": "bf16-true"}},
    "uneven partition": {"strategy": {"partition": [1, 4, 2, 1]}},
    "embedding alone, head alone": {"strategy": {"partition": [1, 5, 3, 1]}},
    "no bubble at any price": {"strategy": {"memory_budget": 2.0}},
    "little memory": {"strategy": {"memory_budget": 0.7}},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature(feature, tmp_path):
    changes = dict(FEATURES[feature])
    strategy = {"schedule": "zb-v", "virtual_devices": 2, **changes.pop("strategy", {})}
    case = _case("tokens", strategy.pop("schedule"), strategy.pop("virtual_devices"), strategy=strategy, **changes)
    _check(case, tmp_path)


@pytest.mark.parametrize(("schedule", "num_devices"), [("zb-v", 2), ("zb-h1", 4)])
def test_whole_kernels_keep_their_bits(schedule, num_devices, tmp_path):
    """Layers whose custom Function computes all its gradients in B, and layers of linear operators alone."""
    _check(_case("kernels", schedule, num_devices), tmp_path)


@pytest.mark.parametrize("schedule", ["zb-v", "zb"])
def test_plans_with_whole_and_split_backwards(schedule, tmp_path):
    """Costs of BW between B and B + W: some backwards of the plan run whole, others do not."""
    ends = (
        LayerCost("prologue", 0.1, 0.1, 0.1, role=LayerRole.PROLOGUE),
        LayerCost("epilogue", 1, 1, 1, role=LayerRole.EPILOGUE),
    )
    layers = [LayerCost(f"layers.{i}", 1, 1, 1, 1.0, 0.5, backward=1.9) for i in range(8)]
    write_costs(CostModel((ends[0], *layers, ends[1]), Link(0.2)), tmp_path / "costs.json")
    result = _check(_case("tokens", schedule, 2, strategy={"costs": tmp_path / "costs.json"}), tmp_path)
    executed = result["statistics"]["passes"]
    assert executed["BW"] > 0
    assert executed["B"] == executed["W"] > 0


def test_dropout_does_not_depend_on_the_pipeline(tmp_path):
    """Layers that draw random numbers: the reference is one device of ours; every placement draws the same."""
    options = {"model_options": {"dropout": 0.2}}
    reference = run(_case("tokens", "zb-v", 1, **options), tmp_path / "one")
    plain = run(_case("tokens", "zb-v", 1, **options).plain(), tmp_path / "plain")
    assert differences([reference], plain) != []  # else dropout did nothing
    for schedule, num_devices in [("zb-v", 2), ("1f1b", 4), ("interleaved", 2)]:
        result = run(_case("tokens", schedule, num_devices, **options), tmp_path / schedule)
        assert differences([result], reference) == [], schedule
