"""What user code sees while microbatches are queued, and modules off the beaten track, against the plain Trainer."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from lightning_zb import ZeroBubbleStrategy
from tests.lightning.models import AdaptedModule, Block, TokenModule, dataset

_ACCUMULATE, _NUM_BATCHES, _NUM_CHUNKS = 3, 6, 4


def _fit(module: L.LightningModule, strategy: Any = None, data: str = "tokens", **options: Any) -> L.Trainer:
    if strategy is None:
        strategy = ZeroBubbleStrategy(**{"schedule": "zb-v", "virtual_devices": 2, **options})
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, accumulate_grad_batches=_ACCUMULATE, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(dataset(data, 2 * _NUM_BATCHES), batch_size=2))
    return trainer


def _assert_bitwise(make, data: str = "tokens", **options: Any) -> tuple[L.LightningModule, L.Trainer]:
    modules = []
    for strategy in ("auto", None):
        L.seed_everything(5, verbose=False)
        modules.append(make())
        trainer = _fit(modules[-1], strategy, data, **({} if strategy else options))
    plain, split = (dict(m.named_parameters()) for m in modules)
    assert plain.keys() == split.keys()
    assert [n for n, p in plain.items() if not torch.equal(p, split[n])] == []
    return modules[1], trainer


class Watching(TokenModule):
    """Writes down what its hooks see."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.calls = 0
        self.outputs: list[float] = []
        self.indices: list[int] = []
        self.gradients: list[bool] = []

    def training_step(self, batch, batch_idx):
        self.calls += 1
        loss = self.loss(batch)
        self.steps.append(batch_idx)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
        self.outputs.append(float(outputs["loss"]))
        self.indices.append(batch_idx)

    def on_after_backward(self) -> None:
        self.gradients.append(any(p.grad is not None for p in self.parameters()))


def test_hooks_while_microbatches_are_queued():
    """Batch by batch they run as ever; losses and gradients come with the last microbatch of a group."""
    L.seed_everything(5, verbose=False)
    plain = Watching()
    _fit(plain, "auto")
    L.seed_everything(5, verbose=False)
    split = Watching()
    _fit(split)
    assert split.indices == plain.indices == list(range(_NUM_BATCHES))
    assert sorted(split.steps) == plain.steps  # each microbatch with its own batch_idx, in the schedule's order
    ends = [j % _ACCUMULATE == _ACCUMULATE - 1 for j in range(_NUM_BATCHES)]
    assert split.outputs == [loss if end else 0.0 for loss, end in zip(plain.outputs, ends, strict=True)]
    assert split.gradients == ends
    assert plain.gradients == [True] * _NUM_BATCHES


def test_code_before_the_layers_runs_once_a_chunk():
    module = Watching()
    _fit(module)
    assert module.calls == _NUM_CHUNKS * _NUM_BATCHES
    assert len(module.steps) == _NUM_BATCHES  # what comes after the layers runs once


def test_low_rank_adapters_on_a_frozen_model():
    module, _ = _assert_bitwise(AdaptedModule)
    assert sum(p.requires_grad for p in module.parameters()) == 4 * len(module.net.layers)
    assert all(p.grad is None for p in module.parameters() if not p.requires_grad)


@pytest.mark.parametrize("schedule", ["zb-v", "1f1b"])
def test_batches_of_other_lengths(schedule):
    """Microbatches of one step differ in shape; each shape's layouts are agreed on when it first comes."""
    _assert_bitwise(TokenModule, "ragged", schedule=schedule)


class Fused(TokenModule):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


@pytest.mark.parametrize("post_validation", ["exact", "off"])
def test_fused_optimizer(post_validation):
    _assert_bitwise(Fused, post_validation=post_validation)


class GatheringBlock(Block):
    def forward(self, x):
        x = super().forward(x)
        self.gathered.append(x.square().mean())
        return x


class Gathering(TokenModule):
    """Its loss multiplies what all layers gathered, so it is no sum over layers."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.net.layers:
            layer.__class__ = GatheringBlock

    def loss(self, batch):
        self.net.gathered = []
        for layer in self.net.layers:
            layer.gathered = self.net.gathered
        loss = super().loss(batch)
        assert len(self.net.gathered) == len(self.net.layers)
        return loss + 1e-2 * torch.stack(self.net.gathered).prod().log()


def test_auxiliary_losses_in_a_list_of_the_users():
    _assert_bitwise(Gathering, side_channels="net.gathered")
    with pytest.raises(ValueError, match=r'side_channels="body.gathered": Gathering has no module "body"'):
        _fit(Gathering(), side_channels="body.gathered")
