"""Costs of a LightningModule's layers without a training run: a few steps in one process, whose weights are thrown away."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader, IterableDataset

from lightning_zb.callback import ZeroBubbleCallback
from lightning_zb.execution.pass_samples import profiling_steps
from lightning_zb.planning.costs import Link
from lightning_zb.planning.partitioning import TooFewLayers
from lightning_zb.profile_window import Profile, ProfileWindow
from lightning_zb.strategy import ZeroBubbleStrategy

_WARM_STEPS = 2  # the first steps allocate optimizer states and caches


class RepeatedBatch(IterableDataset):
    """One batch, again and again.

    Args:
        batch: what `training_step` takes.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.batch

    def loader(self) -> DataLoader:
        """A data loader of it that leaves the batch as it is."""
        return DataLoader(self, batch_size=None, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch


def profile_module(
    module: pl.LightningModule,
    data: pl.LightningDataModule | Iterable[Any] | None = None,
    num_steps: int = 6,
    num_microbatches: int = 4,
    device: str = "cpu",
    precision: str = "32-true",
    layers: str | Sequence[str] | None = None,
    link: Link | None = None,
) -> Profile:
    """Measure what the layers of a module cost for one microbatch, by training it for a few steps on one device.

    The layers run as two chunks, so that it shows what a pass takes besides its layers.

    Args:
        module: any LightningModule; its weights are trained, so hand over one made for this.
        data: a data module, or batches such as a DataLoader; None where the module has its own `train_dataloader`. Short
            data is run through again.
        num_steps: steps that take times, after two to warm up and one that counts bytes.
        num_microbatches: of a step.
        device: `"cpu"`, or another accelerator that Lightning knows, such as `"cuda"`.
        precision: as the Trainer takes it.
        layers: where the layers are, see `ZeroBubbleStrategy`.
        link: between the devices that will run the pipeline; one process cannot measure it.

    Returns:
        What was measured: `costs` of prologue, layers and epilogue, for devices as fast as this one, and beside them their
        spread and which share of W can move.

    Raises:
        ValueError: the module cannot be cut into layers, has only one, or there is no data; says what to do.
    """
    measure = _Measure(num_steps)
    trainer = pl.Trainer(
        accelerator=device,
        devices=1,
        strategy=ZeroBubbleStrategy(schedule="zb-v", virtual_devices=1, layers=layers),
        precision=precision,  # type: ignore[arg-type]
        accumulate_grad_batches=num_microbatches,
        max_steps=_WARM_STEPS + 1 + num_steps,
        max_epochs=-1,
        limit_val_batches=0,
        callbacks=[ZeroBubbleCallback(profile_steps=None, report=False), measure],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        if isinstance(data, pl.LightningDataModule):
            trainer.fit(module, datamodule=data)
        else:
            trainer.fit(module, data)
    except TooFewLayers:
        raise ValueError(
            "the model has one layer, so a pipeline has nothing to divide; where its layers stand in another container, name "
            "that one with --layers PATH (layers=PATH in Python)"
        ) from None
    if measure.profile is None or measure.profile.costs is None:
        raise ValueError(
            f"the data ended after {measure.num_steps} of {trainer.max_steps} steps of {num_microbatches} microbatches; "
            "hand over more of it, or fewer steps or microbatches"
        )
    return replace(measure.profile, costs=replace(measure.profile.costs, link=Link() if link is None else link))


class _Measure(pl.Callback):
    """Measures steps once the first ones are over."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = 0
        self.profile: Profile | None = None
        self._num_timed = num_steps
        self._window: ProfileWindow | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if not trainer.strategy.is_between_steps or self.num_steps < _WARM_STEPS:
            return
        if self._window is None:
            self._window = ProfileWindow(trainer.strategy.pipeline, trainer.optimizers, profiling_steps(1 + self._num_timed))
        self._window.begin_step()

    def on_train_batch_end(self, trainer: Any, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not trainer.strategy.is_between_steps:
            return
        self.num_steps += 1
        if self._window is not None:
            self._window.end_step()
            if self._window.is_over:
                self.profile = self._window.gather()
