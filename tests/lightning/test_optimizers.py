"""Optimizers of all kinds keep the plain Trainer's bits through steps, rollbacks and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning.fitting import Case, differences, run
from tests.lightning.processes import run_cases
from tests.lightning.test_checkpoints import checkpoint_differences

_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "fused": ("AdamW", {"fused": True}),
    "foreach": ("AdamW", {"foreach": True, "amsgrad": True}),
    "fused-sgd": ("SGD", {"fused": True, "momentum": 0.9}),
    "8bit": ("Momentum8bit", {"weight_decay": 0.1}),
}
_SCALES = tuple(0.06 * 1.35**step for step in range(8))


def _case(name: str, folder: Path, **changes: Any) -> Case:
    """Norms grow until they clip: in between a device steps by its own norm, and takes it back by that of the model."""
    kind, options = _KINDS[name]
    model_options = {"optimizer": kind, "optimizer_options": options, "scales": _SCALES, "num_layers": 4}
    return Case(
        name, "tokens", model_options, {"gradient_clip_val": 0.5, "max_epochs": 2}, size=16, accumulate=2, shuffle=False,
        strategy={"schedule": "zb-v", "post_validation": "exact"}, devices=2,
        **{"checkpoint": (5, str(folder / f"{name}.ckpt")), **changes},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.distributed
def test_fused_foreach_and_8_bit_optimizers_keep_their_bits_through_rollback_and_checkpoint(tmp_path: Path):
    """A checkpoint saved while a step is pending is the plain one's to the key, and both go on from it alike."""
    (tmp_path / "plain").mkdir()
    cases = [_case(name, tmp_path) for name in _KINDS]
    resumed = [_case(name, tmp_path, checkpoint=None, resume=str(tmp_path / f"{name}.ckpt")) for name in _KINDS]
    resumed = [replace(case, name=f"{case.name}-resumed") for case in resumed]
    results = run_cases([*cases, *resumed], 2, tmp_path)
    for case in cases:
        saved = 5, str(tmp_path / "plain" / f"{case.name}.ckpt")
        plain = run(replace(case.plain(), checkpoint=saved), tmp_path / "plain")
        assert differences(results[case.name], plain) == [], case.name
        assert sum(part["statistics"]["rollbacks"] for part in results[case.name]) > 0, case.name
        mine, theirs = (torch.load(path, weights_only=True) for path in (tmp_path / f"{case.name}.ckpt", saved[1]))
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
            assert checkpoint_differences(theirs[key], mine[key], f"{case.name} {key}") == []
        again = replace(case.plain(), name=f"{case.name}-again", checkpoint=None, resume=saved[1])
        assert differences(results[f"{case.name}-resumed"], run(again, tmp_path / "plain")) == [], case.name


def test_a_fused_optimizer_gets_gradients_that_are_unscaled_already(tmp_path: Path):
    """Lightning leaves unscaling to it, and so refuses to clip; scales are powers of two, so the bits are the same."""
    case = replace(
        _case("fused", tmp_path, checkpoint=None), strategy={"schedule": "zb-v", "virtual_devices": 2}, devices=1,
        trainer={"max_epochs": 1}, scaler={"init_scale": 2.0**8, "growth_interval": 2},
    )  # fmt: skip
    assert differences([run(case, tmp_path)], run(case.plain(), tmp_path / "plain")) == []
