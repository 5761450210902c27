"""Decisions of post-validation that need no second process."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from lightning_zb.execution.optimistic_step import OptimisticStep
from lightning_zb.execution.statistics import Statistics
from lightning_zb.execution.step_mode import ModeSwitch
from lightning_zb.execution.validation import Outcome, coefficient, judge


@dataclass
class Owner:
    optimizer: torch.optim.Optimizer

    def step(self):
        self.optimizer.step()

    def buffers(self):
        return []

    def is_copy(self, parameter):
        return False


def alone(error_if_nonfinite=False):
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    return weights, OptimisticStep(Owner(optimizer), None, Statistics(), error_if_nonfinite=error_if_nonfinite)


def test_verdicts():
    small, large = torch.tensor(0.5), torch.tensor(2.0)
    assert judge(small, 1.0, False).outcome is Outcome.KEEP
    assert judge(small, 1.0, True).outcome is Outcome.REDO
    assert judge(large, 1.0, False).outcome is Outcome.REDO
    assert judge(torch.tensor(math.inf), 1.0, False).outcome is Outcome.SKIP
    assert judge(torch.tensor(math.nan), math.inf, True).outcome is Outcome.SKIP
    assert judge(large, math.inf, False).outcome is Outcome.KEEP
    assert coefficient(large, 1.0) == pytest.approx(0.5)
    assert math.isnan(coefficient(torch.tensor(math.inf), 1.0))


def test_one_process_clips_as_torch_does():
    weights, step_end = alone()
    twins = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    for w, twin in zip(weights, twins, strict=True):
        w.grad = torch.full_like(w, 3.0)
        twin.grad = torch.full_like(w, 3.0)
    step_end.finish(1.0, (0,))
    torch.nn.utils.clip_grad_norm_(twins, 1.0)
    torch.optim.SGD(twins, lr=1.0).step()
    assert all(map(torch.equal, weights, twins))
    assert all(w.grad is None for w in weights)
    assert not step_end.is_pending


def test_a_step_that_is_not_finite_is_skipped_or_raised():
    for raises in (False, True):
        weights, step_end = alone(raises)
        weights[0].grad = torch.tensor([1.0, math.nan, 1.0])
        if raises:
            with pytest.raises(RuntimeError, match="the gradient norm is nan; no device has stepped"):
                step_end.finish(1.0, (0,))
        else:
            step_end.finish(1.0, (0,))
        assert torch.equal(weights[0].detach(), torch.ones(3))
        assert step_end.statistics.skips == 1


def test_auto_waits_for_quiet_steps_and_falls_back_when_nearly_all_clip():
    switch = ModeSwitch.auto()
    assert not switch.is_optimistic
    changes = [switch.note(restarted=False) for _ in range(8)]
    assert changes == [False] * 7 + [True]
    assert switch.is_optimistic
    assert [switch.note(restarted=True) for _ in range(13)] == [False] * 12 + [True]
    assert not switch.is_optimistic
    for _ in range(5):
        assert not any(switch.note(restarted=False) for _ in range(7))
        assert not switch.note(restarted=True)
    for _ in range(100):
        ModeSwitch.always().note(restarted=True)
    assert ModeSwitch.always().is_optimistic
    assert not ModeSwitch.never().note(restarted=False)
