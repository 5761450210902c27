"""The split backward against plain autograd: the same bits, whatever the operator, layout, precision or use of the weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_zb.execution.split_backward import DeferredWeights, accumulate


def gradients(module, run, microbatches, autocast=False, split=False):
    """Gradients after all microbatches, by name, then the gradients of the inputs."""
    module.zero_grad()
    records, losses, inputs = [], [], []
    for seed in range(microbatches):
        torch.manual_seed(seed)
        record = DeferredWeights()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if split:
                with record.recording():
                    loss, x = run(module)
            else:
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
    return found, records


def assert_same_bits(module, run, microbatches=3, autocast=False):
    """Split and plain gradients agree bit for bit; returns the records of the split run."""
    plain, _ = gradients(module, run, microbatches, autocast)
    split, records = gradients(module, run, microbatches, autocast, split=True)
    assert plain.keys() == split.keys()
    differing = [name for name in plain if not torch.equal(plain[name], split[name])]
    assert not differing
    return records


def weigh(output):
    """A loss whose output gradient is random and dense."""
    return (output * torch.randn(output.shape, dtype=output.dtype)).sum()


def layout(shape, strided):
    if strided and len(shape) > 1:
        shape = (shape[1], shape[0], *shape[2:])
        return torch.randn(shape).transpose(0, 1)
    return torch.randn(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("strided", [True, False])
@pytest.mark.parametrize("shape", [(12,), (7, 12), (5, 7, 12), (2, 5, 7, 12), (1, 12), (4, 1, 12)])
def test_linear(shape, strided, bias, dtype):
    module = nn.Linear(12, 9, bias=bias).to(dtype)

    def run(module):
        x = layout(shape, strided).to(dtype).requires_grad_()
        return weigh(module(x)), x

    records = assert_same_bits(module, run)
    assert not records[0].kept


def test_embedding_needs_no_input_gradient():
    module = nn.Embedding(20, 6, padding_idx=-2, scale_grad_by_freq=True)
    assert_same_bits(module, lambda m: (weigh(m(torch.randint(0, 20, (3, 5)))), None))


@pytest.mark.parametrize("autocast", [True, False])
def test_weight_used_twice_and_tied(autocast):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 16)
            self.inner = nn.Linear(16, 16)

        def forward(self, ids):
            x = self.inner(torch.tanh(self.inner(self.embed(ids))))
            return F.linear(x, self.embed.weight)

    module = Tied()
    assert_same_bits(module, lambda m: (weigh(m(torch.randint(0, 20, (3, 5)))), None), autocast=autocast)


def test_parameter_partly_left_in_backward():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return F.linear(x, self.weight).tanh() + self.weight * x

    fired = []
    module = Mixed()
    module.weight.register_hook(lambda g: fired.append("tensor"))
    module.weight.register_post_accumulate_grad_hook(lambda p: fired.append("accumulated"))

    def run(module):
        x = torch.randn(8, 8, requires_grad=True)
        return weigh(module(x)), x

    assert_same_bits(module, run)
    assert fired == ["tensor", "accumulated"] * 6
