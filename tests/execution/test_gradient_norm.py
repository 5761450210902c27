"""The combined norm equals the unsplit model's, to the last bit."""

import copy

import pytest
import torch
from torch import nn

from lightning_zb.execution.gradient_norm import clip_gradients, local_norms, total_norm


def _parameters(dtype: torch.dtype, count: int = 60) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    parameters = []
    for i in range(count):
        p = nn.Parameter(torch.randn(7 + i, 5, generator=generator).to(dtype))
        if i % 7:  # some without a gradient: empty slots must not shift the reduction
            p.grad = torch.randn(7 + i, 5, generator=generator).to(dtype)
        parameters.append(p)
    return parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
def test_split_norm_and_clipping_are_bitwise_those_of_clip_grad_norm(dtype, num_devices):
    plain = _parameters(dtype)
    split = copy.deepcopy(plain)
    for a, b in zip(plain, split, strict=True):
        b.grad = None if a.grad is None else a.grad.clone()
    expected = nn.utils.clip_grad_norm_([p for p in plain if p.grad is not None], 0.5)
    parts = []
    for device in range(num_devices):  # interleaved ownership: worse than any real partition
        mine = [p if i % num_devices == device else nn.Parameter(torch.empty_like(p)) for i, p in enumerate(split)]
        parts.append(local_norms(mine).get())
    slots = parts[0]
    for part in parts[1:]:
        slots = slots + part
    total = total_norm(slots, split)
    assert torch.equal(total, expected)
    for device in range(num_devices):
        clip_gradients([p.grad for p in split[device::num_devices] if p.grad is not None], 0.5, total)
    assert all(a.grad is None or torch.equal(a.grad, b.grad) for a, b in zip(plain, split, strict=True))


def test_the_order_of_the_slots_matters():
    """Why slots exist: combining norms in another order changes bits for some seed, so a plain sum of squares cannot do."""
    parameters = _parameters(torch.float32)
    exact = total_norm(local_norms(parameters).get(), parameters)
    squares = torch.stack([p.grad.square().sum() for p in parameters if p.grad is not None]).sum().sqrt()
    permuted = [total_norm(local_norms(order).get(), order) for order in (parameters[::-1], parameters[30:] + parameters[:30])]
    assert any(not torch.equal(exact, other) for other in [squares, *permuted])


def test_copies_are_counted_once():
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    assert local_norms([p], owned=[False]).get().filled.sum() == 0
