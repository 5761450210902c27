"""Parallelism of the user's own inside layers is found before training and refused in a sentence that names the place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import context_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchmetrics import MeanMetric

from lightning_zb.inner_parallelism import check_layers_are_whole
from tests.lightning.models import SequentialModule, TokenModule
from tests.lightning.test_user_code import _fit


@pytest.fixture
def group():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.fixture
def module():
    return TokenModule(num_layers=4)


def _check(module, world_size=2, layer_sync=None, num_replicas=1):
    strategy = SimpleNamespace(_layer_sync=layer_sync, replicas=SimpleNamespace(num_replicas=num_replicas))
    check_layers_are_whole(SimpleNamespace(world_size=world_size, strategy=strategy), module)


def test_sharded_parameters(group, module):
    mesh = DeviceMesh("cpu", [0, 1])
    weight = module.net.layers[2].up.weight
    module.net.layers[2].up.weight = nn.Parameter(DTensor.from_local(weight.detach(), mesh, [Replicate()]))
    with pytest.raises(ValueError, match=r'parameter "net.layers.2.up.weight" is spread over a device mesh'):
        _fit(module)


def test_layers_with_a_group_of_their_own(group, module):
    """As Megatron-like and Transformer Engine layers keep it, whatever they call it."""
    module.net.layers[1].up.cp_group = group
    with pytest.raises(ValueError, match=r'"net.layers.1.up" \(Linear\) has a process group of 2 processes'):
        _fit(module)


def test_hooks_that_communicate(group, module):
    """As `distribute_module` and torch's context parallel plans install them."""
    mesh = DeviceMesh("cpu", [0, 1])
    module.net.layers[3].register_forward_pre_hook(lambda layer, inputs: (mesh, inputs)[1])
    with pytest.raises(ValueError, match=r'"net.layers.3" \(Block\) has a device mesh of 2 processes'):
        _fit(module)


def test_replicas_within_the_module(group, module):
    module.net.layers[0] = nn.parallel.DistributedDataParallel(module.net.layers[0])
    with pytest.raises(ValueError, match=r'"net.layers.0" \(DistributedDataParallel\) has a .* of 2 processes'):
        _fit(module)


def test_batch_norms_that_synchronise(module):
    _check(module, layer_sync=object())
    with pytest.raises(ValueError, match=r"sync_batchnorm=True.* leave it out"):
        _check(module, layer_sync=object(), num_replicas=2)
    module.net.norm = nn.SyncBatchNorm(4)
    _check(module, world_size=1)
    with pytest.raises(ValueError, match=r'"net.norm" is a SyncBatchNorm'):
        _check(module)


def test_what_is_whole_passes(group, module):
    module.metric = MeanMetric(process_group=group)
    module.net.layers[0].alone = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    _check(module)


class Attending(SequentialModule):
    """Splits sequences over processes around its step, as torch's tutorial on context parallelism does."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Attention() for _ in range(4)))

    def loss(self, batch):
        x = torch.ones(1, 4, 8)
        with context_parallel(DeviceMesh("cpu", [0, 1]), buffers=[x], buffer_seq_dims=[1]):
            return self.model(x).sum()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x):
        q = self.project(x)[:, None]
        return F.scaled_dot_product_attention(q, q, q)[:, 0]


def test_context_parallel_steps(group):
    with pytest.raises(ValueError, match=r"layer \"model.0\" runs under torch's context_parallel"):
        _fit(Attending())


def test_zamba2():
    module = TokenModule(num_layers=4)
    module.net.config = SimpleNamespace(model_type="zamba2", is_encoder_decoder=False)
    with pytest.raises(ValueError, match=r"is a zamba2, whose shared attention blocks .* train another hybrid"):
        _fit(module)
