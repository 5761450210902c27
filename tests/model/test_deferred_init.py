import random

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn

from lightning_zb.model.deferred_init import DeferredInit, materialise
from lightning_zb.model.layers import find_layers
from lightning_zb.model.ownership import take_ownership
from lightning_zb.model.windows import windows
from lightning_zb.planning.placement import Partition, cyclic, wave
from tests.model.hugging_face import CausalLanguageModel
from tests.model.modules import LanguageModel, SequentialModule

CPU = torch.device("cpu")


class Configured(L.LightningModule):
    """Builds its model in configure_model."""

    def __init__(self, build):
        super().__init__()
        self.build = build

    def configure_model(self):
        self.inner = self.build()


def oddities():
    """Initialisations of all sorts: views, values from Python, shared memory, orthogonal, truncated, buffers."""
    module = LanguageModel(4, tied=True)
    module.register_buffer("mask", torch.tril(torch.ones(4, 4)))
    module.register_buffer("noise", torch.randn(3) * 2)
    module.table = torch.arange(5, dtype=torch.float32).sqrt()
    module.alias = module.mask
    with torch.no_grad():
        module.embed.weight[0].zero_()
        module.embed.weight.data[1].fill_(2.5)
        module.norm.weight.copy_(torch.tensor([1.0, 2.0] * 4))
        module.norm.bias.copy_(torch.from_numpy(np.arange(8.0)))
        for block in module.blocks:
            nn.init.orthogonal_(block.up.weight)
            nn.init.trunc_normal_(block.down.weight, std=0.1)
            block.up.bias.uniform_(-random.random(), 1.0)
            block.down.bias.data = torch.linspace(0, 1, 16)[:8].clone()
        module.blocks[3].norm.weight.copy_(module.blocks[1].norm.weight + module.blocks[2].up.weight[0, :8])
    module.blocks[0].norm.requires_grad_(False)
    module.blocks[1].register_buffer("count", torch.zeros(1))
    return module


def built(build):
    torch.manual_seed(3)
    random.seed(3)
    module = Configured(build)
    module.configure_model()
    return module, torch.rand(2)


def held_by(build, counts, placement, device):
    torch.manual_seed(3)
    random.seed(3)
    module, deferred = Configured(build), DeferredInit(CPU)
    with deferred.recording():
        module.configure_model()
    assert all(p.is_meta for p in module.parameters())
    stack = find_layers(module)
    all_windows = windows(Partition.from_counts(counts), len(stack))
    ownership = take_ownership(module, stack, [all_windows[c] for c in placement.chunks_of(device)])
    ownership = materialise(module, stack, ownership, deferred)
    return module, ownership, deferred, torch.rand(2)


CASES = {
    "sequential": (lambda: SequentialModule(4), [2, 1, 1, 2]),
    "oddities": (oddities, [2, 1, 1, 2]),
    "llama": (lambda: CausalLanguageModel("llama", seed=None), [2, 1, 1, 2]),
    "nemotron_h": (lambda: CausalLanguageModel("nemotron_h", seed=None), [2, 2, 1, 2]),
    "mixtral": (lambda: CausalLanguageModel("mixtral", seed=None), [1, 2, 2, 1]),
    "gpt2": (lambda: CausalLanguageModel("gpt2", seed=None), [2, 1, 1, 2]),
}


@pytest.mark.parametrize("placement", [wave(2), cyclic(4)])
@pytest.mark.parametrize("case", CASES)
def test_own_values_are_those_of_an_ordinary_build(case, placement):
    build, counts = CASES[case]
    plain, after = built(build)
    expected, buffers = dict(plain.named_parameters()), dict(plain.named_buffers())
    seen = set()
    for device in range(placement.num_devices):
        module, ownership, _, after_here = held_by(build, counts, placement, device)
        assert torch.equal(after, after_here)
        assert list(dict(module.named_parameters())) == list(expected)
        for (name, p), held in zip(ownership.parameters, ownership.held, strict=True):
            assert p.requires_grad == expected[name].requires_grad
            if held:
                seen.add(name)
                assert torch.equal(p, expected[name]), name
        for name, b in module.named_buffers():
            if not b.is_meta:
                assert torch.equal(b, buffers[name]), name
        assert ownership.buffers <= {name for name, b in module.named_buffers() if not b.is_meta}
    assert seen == expected.keys()


def test_attributes_and_shared_memory_come_along():
    module, *_ = held_by(oddities, [2, 1, 1, 2], wave(2), 0)
    assert torch.equal(module.inner.table, torch.arange(5, dtype=torch.float32).sqrt())
    assert module.inner.alias.data_ptr() == module.inner.mask.data_ptr()
    assert module.inner.head.weight is module.inner.embed.weight
    middle, *_ = held_by(oddities, [2, 1, 1, 2], wave(2), 1)
    assert not middle.inner.positions.is_meta
    assert middle.inner.positions.untyped_storage().nbytes() == 4


def test_never_the_whole_model():
    def build():
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))

    layer_bytes = 4 * (64 * 64 + 64)
    _, ownership, deferred, _ = held_by(build, [5, 4, 4, 5], cyclic(4), 1)
    assert ownership.own_bytes == 4 * layer_bytes
    assert deferred.peak_bytes <= 5 * layer_bytes
    assert sum(held_by(build, [5, 4, 4, 5], cyclic(4), d)[1].own_bytes for d in range(4)) == 16 * layer_bytes


def test_what_has_no_values_is_named():
    module, deferred = Configured(lambda: LanguageModel(2)), DeferredInit(CPU)
    with torch.device("meta"):
        module.configure_model()
    stack = find_layers(module)
    ownership = take_ownership(module, stack, windows(Partition.from_counts([4]), 2))
    with pytest.raises(RuntimeError, match=r'parameter "inner.positions" has no values: build it in configure_model'):
        materialise(module, stack, ownership, deferred)


def test_values_may_be_read_and_generators_seeded_while_building():
    def build():
        module = SequentialModule(2)
        module.third = float(torch.linspace(0, 1, 5)[1]) + float(torch.rand(()))
        torch.manual_seed(11)
        module.register_buffer("coins", torch.bernoulli(torch.full((6,), 0.3)))
        module.register_buffer("order", torch.randperm(5, generator=torch.Generator().manual_seed(2)))
        return module

    plain, after = built(build)
    module, _, _, after_here = held_by(build, [4], cyclic(1), 0)
    assert torch.equal(after, after_here)
    assert module.inner.third == plain.inner.third
    assert torch.equal(module.inner.coins, plain.inner.coins)
    assert torch.equal(module.inner.order, plain.inner.order)
