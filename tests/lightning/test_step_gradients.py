"""Gradients between the schedule and backward."""

from __future__ import annotations

import torch
from torch import nn

from lightning_zb.step_gradients import StepGradients


def test_what_a_schedule_computes_survives_zero_grad_and_adds_to_what_was_there():
    module = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(3))
    first, second, third = module
    first.grad, second.grad = torch.ones(1), torch.ones(1)
    gradients = StepGradients()
    with gradients.computing(module):
        assert all(p.grad is None for p in module)
        first.grad, third.grad = torch.full((1,), 2.0), torch.full((1,), 3.0)
    assert [p.grad for p in module] == [torch.ones(1), torch.ones(1), None]
    second.grad = None  # as zero_grad does
    gradients.enter()
    assert [p.grad for p in module] == [torch.full((1,), 3.0), None, torch.full((1,), 3.0)]
    gradients.enter()
    assert first.grad == torch.full((1,), 3.0)  # once only
