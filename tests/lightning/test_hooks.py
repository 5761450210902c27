"""Hooks of the module that the strategy wraps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_zb import hooks
from tests.lightning.bad_modules import TwoOptimizers
from tests.lightning.models import SequentialModule


def test_a_module_that_goes_to_another_trainer_shares_that_ones_metrics(monkeypatch):
    shared: list[Any] = []
    monkeypatch.setattr(hooks, "share_metrics", shared.append)
    module = SequentialModule()
    trainers = [SimpleNamespace(strategy=SimpleNamespace(has_loss=True)) for _ in range(2)]
    for trainer in trainers:
        module._trainer = trainer
        hooks.adapt_hooks(module)
        module.on_train_epoch_end()
    assert [trainer is trainers[1] for trainer in shared] == [False, False, True, True]


def test_two_optimizers_are_refused_where_they_are_made():
    """Ahead of Lightning's own check, which would advise manual optimization."""
    module = TwoOptimizers()
    hooks.adapt_hooks(module)
    with pytest.raises(ValueError, match="returned 2 optimizers; the zero_bubble strategy trains with one"):
        module.configure_optimizers()
    one = SequentialModule()
    hooks.adapt_hooks(one)
    assert isinstance(one.configure_optimizers()["optimizer"], torch.optim.Optimizer)
