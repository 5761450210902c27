"""Runs a module with plain and with split backward over several microbatches and compares every bit."""

from contextlib import ExitStack

import torch
from torch import nn

from lightning_zb.execution.split_backward import DeferredWeights, accumulate


def run_microbatches(module, run, num_microbatches, autocast, split):
    """All F, all B, all W (plain: forward and backward in turn).

    Returns:
        Gradients by name, inputs' too, and the records.
    """
    module.zero_grad()
    records, losses, inputs = [], [], []
    for seed in range(num_microbatches):
        torch.manual_seed(seed)
        record = DeferredWeights()
        with ExitStack() as stack:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16, enabled=autocast))
            if split:
                stack.enter_context(record.recording())
            loss, x = run(module)
        records.append(record)
        losses.append(loss)
        inputs.append(x)
        if not split:
            loss.backward()
    if split:
        for record, loss in zip(records, losses, strict=True):
            with record.recording():
                loss.backward()
        for record in records:
            accumulate(record.contributions())
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    found |= {f"input {i}": x.grad.clone() for i, x in enumerate(inputs) if x is not None and x.grad is not None}
    found |= {f"loss {i}": loss.detach() for i, loss in enumerate(losses)}
    return found, records


def assert_same_bits(module, run, num_microbatches=3, autocast=False, allowed=()):
    """Split and plain gradients agree bit for bit.

    Args:
        module: the module.
        run: takes the module and returns the loss and the input (None without one that needs a gradient).
        num_microbatches: to run.
        autocast: whether under bfloat16 autocast.
        allowed: names of operators that may stay whole in B.

    Returns:
        The records of the split run.
    """
    plain, _ = run_microbatches(module, run, num_microbatches, autocast, split=False)
    split, records = run_microbatches(module, run, num_microbatches, autocast, split=True)
    assert plain.keys() == split.keys()
    differing = {
        name: (plain[name] - split[name]).abs().max().item() for name in plain if not torch.equal(plain[name], split[name])
    }
    assert not differing
    assert set(records[0].kept) <= set(allowed)
    return records


def weigh(output):
    """A loss whose output gradient is random and dense."""
    return (output * torch.randn(output.shape, dtype=output.dtype)).sum()


class Holder(nn.Module):
    """A module with parameters of these shapes, and a function of itself and of its input."""

    def __init__(self, function, dtype=torch.float32, **shapes):
        super().__init__()
        torch.manual_seed(0)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape).to(dtype)))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def layout(shape, strided):
    if strided and len(shape) > 1:
        shape = (shape[1], shape[0], *shape[2:])
        return torch.randn(shape).transpose(0, 1)
    return torch.randn(shape)


def on_random(shape, strided=False, dtype=torch.float32, needs_gradient=True):
    def run(module):
        x = layout(shape, strided).to(dtype).requires_grad_(needs_gradient)
        return weigh(module(x)), x

    return run


def deferred_parameters(module, run):
    """The parameters whose gradients W computes."""
    record = DeferredWeights()
    with record.recording():
        loss, _ = run(module)
    with record.recording():
        loss.backward()
    deferred = set(record.contributions())
    return {name for name, p in module.named_parameters() if p in deferred}
