"""Decisions of post-validation that need no second process."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from lightning_zb.execution.gradient_norm import NormSlots
from lightning_zb.execution.optimistic_step import OptimisticStep
from lightning_zb.execution.statistics import Statistics
from lightning_zb.execution.step_mode import ModeSwitch
from lightning_zb.execution.validation import ExpectedVerdict, Outcome, Report, Verdict, clips, judge


@dataclass
class Owner:
    optimizer: torch.optim.Optimizer
    is_shared = False

    def share(self):
        pass

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


def outcome(norm, max_norm, held=False, overflowed=False, scales_loss=False):
    report = Report(NormSlots.empty(1), overflowed, held)
    return judge(report, torch.tensor(norm), max_norm, scales_loss).outcome


def test_verdicts():
    assert outcome(0.5, 1.0) is Outcome.KEEP
    assert outcome(0.5, 1.0, held=True) is Outcome.REDO
    assert outcome(2.0, 1.0) is Outcome.REDO
    assert outcome(math.inf, 1.0) is Outcome.SKIP
    assert outcome(math.nan, math.inf, held=True) is Outcome.SKIP
    assert outcome(2.0, math.inf) is Outcome.KEEP
    assert clips(torch.tensor(2.0), 1.0)
    assert not clips(torch.tensor(0.5), 1.0)
    assert clips(torch.tensor(math.nan), 1.0)


def test_verdicts_of_a_loss_scaler():
    assert outcome(0.5, 1.0, overflowed=True, scales_loss=True) is Outcome.SKIP
    assert outcome(math.inf, 1.0, scales_loss=True) is Outcome.REDO  # finite elements, a norm beyond float32: clipped to zero
    assert outcome(0.0, math.inf, scales_loss=True) is Outcome.KEEP


def test_reports_travel_and_add_up():
    first = Report(
        NormSlots(torch.tensor([1.0, 0.0]).double(), torch.tensor([1.0, 0.0]).double()),
        overflowed=True,
        counters=(1.0, 0.0, 2.0, 0.0),
    )
    second = Report(
        NormSlots(torch.tensor([0.0, 2.0]).double(), torch.tensor([0.0, 1.0]).double()),
        held=True,
        counters=(3.0, 4.0, 0.0, 0.0),
    )
    for total in (first + second, Report.from_message(first.to_message() + second.to_message())):
        assert total.slots.values.tolist() == [1.0, 2.0]
        assert total.slots.filled.tolist() == [1.0, 1.0]
        assert total.overflowed
        assert total.held
        assert total.counters == (4.0, 4.0, 2.0, 0.0)
    assert not Report.from_message(first.to_message()).held


def test_one_process_clips_as_torch_does():
    weights, step_end = alone()
    twins = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    for w, twin in zip(weights, twins, strict=True):
        w.grad = torch.full_like(w, 3.0)
        twin.grad = torch.full_like(w, 3.0)
    step_end.clip(1.0)
    step_end.finish((0,))
    torch.nn.utils.clip_grad_norm_(twins, 1.0)
    torch.optim.SGD(twins, lr=1.0).step()
    assert all(map(torch.equal, weights, twins))
    assert all(torch.equal(w.grad, twin.grad) for w, twin in zip(weights, twins, strict=True))
    assert not step_end.is_pending


def test_a_step_that_is_not_finite_is_skipped_or_raised():
    for raises in (False, True):
        weights, step_end = alone(raises)
        weights[0].grad = torch.tensor([1.0, math.nan, 1.0])
        if raises:
            with pytest.raises(RuntimeError, match="the gradient norm is nan; no device has stepped"):
                step_end.clip(1.0)
        else:
            step_end.clip(1.0)
            step_end.finish((0,))
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


@pytest.mark.parametrize("outcome", [Outcome.KEEP, Outcome.SKIP, None])
def test_after_an_exception_weights_are_validated(outcome):
    """Those of the pending step if its verdict comes in time, else those before it."""
    weights, step_end = alone()
    weights[0].grad = torch.full((3,), 0.25)
    never = threading.Event()

    def wait() -> Verdict:
        if outcome is None:
            never.wait(10)
        return Verdict(outcome, torch.tensor(0.5))

    step_end._pend(1.0, ExpectedVerdict(wait), holds=False)
    assert torch.equal(weights[0].detach(), torch.full((3,), 0.75))
    step_end.abandon(seconds=5.0 if outcome is not None else 0.05)
    never.set()
    assert not step_end.is_pending
    assert torch.equal(weights[0].detach(), torch.full((3,), 0.75 if outcome is Outcome.KEEP else 1.0))
    assert weights[0].grad is None
