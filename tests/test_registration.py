"""Importing the package registers the strategy, whoever is imported first, and imports neither torch nor Lightning."""

from __future__ import annotations

import subprocess
import sys

import pytest
from lightning.pytorch.strategies import StrategyRegistry

import lightning_zb
from lightning_zb.registration import register_with_lightning

BEFORE_LIGHTNING = """
import importlib, sys
import lightning_zb.planning.planner
assert not {"torch", "lightning"} & set(sys.modules)
assert callable(lightning_zb.sharded_checkpoint.consolidate) and callable(lightning_zb.profiling.profile_module)
import lightning as L
import lightning.pytorch.strategies as module
trainer = L.Trainer(strategy="zero_bubble", devices=1, accelerator="cpu", logger=False, enable_checkpointing=False)
assert type(trainer.strategy) is lightning_zb.ZeroBubbleStrategy
assert type(module.__loader__) is type(module.__spec__.loader) is type(importlib.__loader__)  # as if nobody had looked
importlib.reload(module)
assert "zero_bubble" in module.StrategyRegistry
"""


def test_before_lightning():
    done = subprocess.run([sys.executable, "-c", BEFORE_LIGHTNING], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_after_lightning():
    StrategyRegistry.remove("zero_bubble")
    register_with_lightning()
    assert isinstance(StrategyRegistry.get("zero_bubble"), lightning_zb.ZeroBubbleStrategy)


def test_unknown_names_are_attribute_errors():
    assert {"ZeroBubbleStrategy", "ZeroBubbleCallback"} <= set(dir(lightning_zb))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = lightning_zb.nothing
