"""Undoing optimizer steps: exact to the bit from a copy, close by inverse arithmetic."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from lightning_zb.execution.rollback import Inversion, Snapshot

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, weight_decay=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "maximize": partial(torch.optim.SGD, lr=0.1, momentum=0.9, maximize=True),
    "adam": partial(torch.optim.Adam, lr=1e-2),
    "coupled": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "adamw-foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw-fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "amsgrad": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.5, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "adadelta": partial(torch.optim.Adadelta),
    "radam": partial(torch.optim.RAdam, lr=1e-2),
    "nadam": partial(torch.optim.NAdam, lr=1e-2),
    "asgd": partial(torch.optim.ASGD, lr=1e-2),
    "rprop": partial(torch.optim.Rprop, lr=1e-2),
}
INVERTIBLE = [name for name, make in OPTIMIZERS.items() if make.func.__name__ in ("SGD", "Adam", "AdamW") and name != "amsgrad"]


def make(name, num_steps):
    """A few parameters, their optimizer after some steps, and the gradients of the next one."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(50, 40, generator=generator)), nn.Parameter(torch.randn(7, generator=generator))]
    optimizer = OPTIMIZERS[name]([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.05}])
    for _ in range(num_steps):
        set_gradients(parameters, generator)
        optimizer.step()
    set_gradients(parameters, generator)
    return parameters, optimizer


def set_gradients(parameters, generator):
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)


def contents(parameters, optimizer):
    return copy.deepcopy(([p.detach() for p in parameters], [optimizer.state.get(p) for p in parameters]))


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    return one == other


@pytest.mark.parametrize("num_steps", [0, 1, 5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_snapshot_brings_back_every_bit(name, num_steps):
    parameters, optimizer = make(name, num_steps)
    before = contents(parameters, optimizer)
    snapshot = Snapshot.take(optimizer, parameters)
    optimizer.step()
    first = contents(parameters, optimizer)
    assert not equal(before, first)
    snapshot.restore()
    assert equal(before, contents(parameters, optimizer))
    optimizer.step()
    assert equal(first, contents(parameters, optimizer))


@pytest.mark.parametrize("num_steps", [0, 1, 5])
@pytest.mark.parametrize("name", INVERTIBLE)
def test_inverse_arithmetic_comes_close(name, num_steps):
    parameters, optimizer = make(name, num_steps)
    before = contents(parameters, optimizer)
    inversion = Inversion.prepare(optimizer, {p: p.grad for p in parameters})
    optimizer.step()
    inversion.restore()
    weights, states = contents(parameters, optimizer)
    for weight, old in zip(weights, before[0], strict=True):
        torch.testing.assert_close(weight, old, rtol=1e-6, atol=1e-7)
    for state, old in zip(states, before[1], strict=True):
        old_tensors = {k: v for k, v in (old or {}).items() if isinstance(v, torch.Tensor)}
        for key, value in old_tensors.items():
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-6)
        if not old_tensors:
            assert not state or all(not isinstance(v, torch.Tensor) for v in state.values())


def test_inverse_arithmetic_restores_nearly_all_bits_of_adamw():
    parameters, optimizer = make("adamw", 20)
    before = contents(parameters, optimizer)[0][0]
    inversion = Inversion.prepare(optimizer, {p: p.grad for p in parameters})
    optimizer.step()
    inversion.restore()
    share = float((parameters[0].detach() == before).float().mean())
    assert share > 0.9


def test_what_cannot_be_inverted_is_refused():
    parameters, optimizer = make("amsgrad", 1)
    with pytest.raises(ValueError, match='a maximum has no inverse; use post_validation="exact"'):
        Inversion.prepare(optimizer, {p: p.grad for p in parameters})
    parameters, optimizer = make("rmsprop", 1)
    with pytest.raises(ValueError, match=r"RMSprop cannot be undone in place \(only Adam, AdamW, SGD can\)"):
        Inversion.prepare(optimizer, {p: p.grad for p in parameters})


def test_parameters_without_a_gradient_are_left_alone():
    parameters, optimizer = make("adamw", 1)
    parameters[1].grad = None
    before = contents(parameters, optimizer)
    inversion = Inversion.prepare(optimizer, {parameters[0]: parameters[0].grad})
    optimizer.step()
    inversion.restore()
    assert equal(before[1][1], contents(parameters, optimizer)[1][1])
    assert torch.equal(before[0][1], parameters[1])
