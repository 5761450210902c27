"""What a pipeline cannot run, said in one sentence that names what to do instead."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging, Timer
from lightning.pytorch.callbacks.timer import Interval
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_zb.inner_parallelism import check_layers_are_whole


def check_automatic(module: pl.LightningModule) -> None:
    """Refuse manual optimization, ahead of Lightning, which asks for other options of the Trainer first.

    Raises:
        ValueError: one clear sentence.
    """
    if module._trainer is not None and module.trainer.training and not module.automatic_optimization:
        raise ValueError(
            "manual optimization decides its own backward passes, so there is no schedule to run; "
            "set self.automatic_optimization = True to train with the zero_bubble strategy"
        )


def check_trainer(trainer: Any, module: pl.LightningModule) -> None:
    """Refuse modules and Trainer options whose results would be wrong.

    Raises:
        ValueError: one clear sentence.
    """
    if getattr(module, "_compiler_ctx", None) is not None:
        raise ValueError(
            "a torch.compile'd LightningModule cannot be cut into chunks; "
            "compile its layers instead: layer.compile() in configure_model"
        )
    check_layers_are_whole(trainer, module)
    if not trainer.training:
        return
    for callback in trainer.callbacks:
        _check_callback(callback)
    _check_model(module)
    if trainer.accumulate_grad_batches == 1:
        rank_zero_warn(
            "accumulate_grad_batches=1 gives the pipeline one microbatch a step, so nothing overlaps; "
            "set Trainer(accumulate_grad_batches=m) with m of at least twice the devices and a batch size divided by m"
        )
    if is_overridden("configure_gradient_clipping", module):
        rank_zero_warn(
            "configure_gradient_clipping sees only the gradients of this device's layers; "
            "call self.clip_gradients(optimizer, gradient_clip_val=...) in it, which clips by the norm of the whole model"
        )


def _check_model(module: pl.LightningModule) -> None:
    for m in module.modules():
        config = getattr(m, "config", None)
        if getattr(config, "model_type", None) == "zamba2":
            raise ValueError(
                f"{type(m).__name__} is a zamba2, whose shared attention blocks stand in several layers and read the embedding "
                "again in each; a pipeline carries what one layer hands to the next: train another hybrid such as nemotron_h"
            )
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(
                f"{type(m).__name__} is an encoder-decoder, whose decoder layers all read what the encoder returned; "
                "a pipeline carries what one layer hands to the next: train a decoder-only or encoder-only model"
            )


def _check_callback(callback: Callback) -> None:
    name = type(callback).__name__
    averaging = any(kind.__name__ == "WeightAveraging" for kind in type(callback).__mro__)  # of Lightning 2.6
    if averaging or isinstance(callback, StochasticWeightAveraging):
        raise ValueError(
            f"{name} copies the whole model on every rank and averages weights before they are validated; "
            "remove it to train with the zero_bubble strategy, and average checkpoints afterwards"
        )
    times_steps = isinstance(callback, Timer) and callback._interval == Interval.step and callback._duration is not None
    if times_steps or (isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None):
        rank_zero_warn(
            f"{name} asks for the time after every batch, and all devices wait for the answer; "
            + ("use Timer(interval='epoch')" if times_steps else "use every_n_train_steps instead of train_time_interval")
            + " to keep the pipeline without barriers"
        )


def check_optimizers(optimizers: list[Any]) -> None:
    """Refuse what the optimizer step cannot hold back or split.

    Raises:
        ValueError: one clear sentence.
    """
    if len(optimizers) != 1:
        raise ValueError(
            f"configure_optimizers returned {len(optimizers)} optimizers; the zero_bubble strategy trains with one: "
            "use one optimizer with several parameter groups"
        )
    if isinstance(optimizers[0], torch.optim.LBFGS):
        raise ValueError(
            "LBFGS evaluates the loss several times a step, which a pipeline cannot do; use for example torch.optim.AdamW"
        )


def reads_gradients(module: pl.LightningModule) -> bool:
    """Whether hooks of the module look at gradients after they were clipped, so that steps cannot be validated later."""
    return any(is_overridden(hook, module) for hook in ("configure_gradient_clipping", "on_before_zero_grad"))
