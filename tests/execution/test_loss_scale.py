"""The loss scaler on one device moves as if it saw the gradients of all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zb.execution.loss_scale import LossScale

OVERFLOWS = (False, True, False, False, False, True, False, False, False, False)  # somewhere in the model, step by step


def make(has_gradient=True):
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    return weight if has_gradient else None, optimizer, scaler


def unscale(weight, optimizer, scaler, overflows):
    loss = scaler.scale(torch.ones(()))
    if weight is not None:
        weight.grad = torch.full_like(weight, float("inf") if overflows else float(loss))
    scaler.unscale_(optimizer)


@pytest.mark.parametrize("has_gradient", [True, False])
@pytest.mark.parametrize("is_here", [True, False])
def test_scale_moves_as_in_one_process(has_gradient, is_here):
    """Whether the overflow is on this device or on another, and also where no parameter has a gradient."""
    plain, ours = make(), make(has_gradient)
    scale = LossScale(ours[2], ours[1])
    for step, overflows in enumerate(OVERFLOWS):
        unscale(*plain, overflows)
        plain[2].step(plain[1])
        plain[2].update()
        unscale(*ours, overflows and is_here)
        flag = scale.overflow()
        assert (flag is None) == (not has_gradient)
        assert flag is None or bool(flag.get() > 0) == (overflows and is_here), step
        if has_gradient and not overflows:
            assert torch.equal(ours[0].grad, torch.ones(3))
        scale.update(overflows)
        assert ours[2].state_dict() == plain[2].state_dict(), step
