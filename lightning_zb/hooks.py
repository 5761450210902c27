"""The module's hooks and the loops' results, made fit for ranks without the loss.

The user's code after the layers runs on the rank of the last chunk alone, so lists and metrics that it fills are empty
elsewhere. Hooks that read them still run on every rank, since they may change the module's state; where one fails on a
rank without the loss, it lacks what only the loss rank has, and is passed over with a warning. Around a training batch that
is so for a `KeyError` alone, which a metric that was not logged there raises, and on the loss rank too while microbatches are
queued. Else every error counts there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from operator import itemgetter
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import _configure_optimizers
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_zb.metrics import share_metrics
from lightning_zb.refusals import check_optimizers

_STAGES = ("validation", "test", "predict")
_READ_OUTPUTS = tuple(f"on_{stage}_{end}_end" for stage in _STAGES for end in ("batch", "epoch"))


class _Tolerance(NamedTuple):
    """What a hook may fail with where it lacks what the layers after it would have given.

    Args:
        error: which exceptions are passed over.
        lacks: whether that is missing, by the strategy; another one has it all.
    """

    error: type[Exception]
    lacks: Callable[[Any], bool]


def _has_no_loss(strategy: Any) -> bool:
    return not getattr(strategy, "has_loss", True)


def _has_no_loss_yet(strategy: Any) -> bool:
    return _has_no_loss(strategy) or not getattr(strategy, "is_between_steps", True)


_ELSEWHERE = _Tolerance(Exception, _has_no_loss)
_AROUND_BATCHES = _Tolerance(KeyError, _has_no_loss_yet)
_TOLERANCES = {
    **dict.fromkeys(_READ_OUTPUTS, _ELSEWHERE),
    "on_train_batch_start": _AROUND_BATCHES,
    "on_train_batch_end": _AROUND_BATCHES,
}


def adapt_hooks(module: pl.LightningModule) -> None:
    """Wrap the module's hooks on the instance: those that read outputs, the end of the training epoch, the optimizers' making.

    The monitoring callbacks come right after `on_train_epoch_end` of the module, so what they monitor is shared there.
    A callback could not stand in that place: a Checkpoint subclass would, but it would become
    `trainer.checkpoint_callback`.

    Args:
        module: the user's LightningModule; another Trainer may have adapted its hooks before.
    """
    for name, tolerance in _TOLERANCES.items():
        if is_overridden(name, module):
            _replace(module, name, _tolerant(getattr(module, name), name, lambda _: module.trainer, tolerance))
    users_hook = _tolerant(module.on_train_epoch_end, "on_train_epoch_end", lambda _: module.trainer, _ELSEWHERE)

    @wraps(module.on_train_epoch_end)
    def on_train_epoch_end() -> None:
        share_metrics(module.trainer)
        users_hook()
        share_metrics(module.trainer)

    _replace(module, "on_train_epoch_end", on_train_epoch_end)
    _replace(module, "configure_optimizers", _checked(module.configure_optimizers, module))


def adapt_callbacks(trainer: Any) -> None:
    """Wrap the same hooks of the user's own callbacks; those of Lightning and of this package know what they do.

    Args:
        trainer: has the callbacks; some may be adapted already, for another Trainer.
    """
    for callback in trainer.callbacks:
        for name, tolerance in _TOLERANCES.items():
            if not getattr(type(callback), name).__module__.startswith(("lightning.", "lightning_zb.")):
                full_name = f"{type(callback).__name__}.{name}"
                _replace(callback, name, _tolerant(getattr(callback, name), full_name, itemgetter(0), tolerance))


def restore(module: pl.LightningModule, callbacks: Iterable[pl.Callback]) -> None:
    """Give module and callbacks their own hooks back, for whatever runs them next.

    Args:
        module: was adapted, or not.
        callbacks: the same.
    """
    for owner in (module, *callbacks):
        for name in (*_TOLERANCES, "on_train_epoch_end", "configure_optimizers"):
            hook = vars(owner).get(name)
            if not getattr(hook, "_lightning_zb", False):
                continue
            delattr(owner, name)
            own = hook.__wrapped__  # type: ignore[union-attr]
            if getattr(own, "__func__", None) is not getattr(type(owner), name, None):  # set on the instance by the user
                setattr(owner, name, own)


def share_results(trainer: Any) -> None:
    """Let `trainer.validate`, `test` and `predict` return on every rank what they return on the loss rank."""
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.run = _shared(loop.run, trainer)


def _shared(run: Callable[[], Any], trainer: Any) -> Callable[[], Any]:
    if getattr(run, "_lightning_zb", False):
        return run

    @wraps(run)
    def run_and_share() -> Any:
        return trainer.strategy.broadcast_loss_rank(run())

    run_and_share._lightning_zb = True  # type: ignore[attr-defined]
    return run_and_share


def _checked(configure_optimizers: Callable[[], Any], module: pl.LightningModule) -> Callable[[], Any]:
    """Refuse what a pipeline cannot step, ahead of Lightning, which would advise manual optimization for two optimizers.

    Another Trainer with another strategy may step it all.
    """

    @wraps(configure_optimizers)
    def configure_and_check() -> Any:
        configured = configure_optimizers()
        if configured is not None and (module._trainer is None or hasattr(module.trainer.strategy, "has_loss")):
            check_optimizers(_configure_optimizers(configured)[0])
        return configured

    return configure_and_check


def _tolerant(
    hook: Callable[..., Any], name: str, find_trainer: Callable[[Sequence[Any]], Any], tolerance: _Tolerance
) -> Callable[..., Any]:
    @wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        trainer = find_trainer(args)
        if not tolerance.lacks(trainer.strategy):
            return hook(*args, **kwargs)
        try:
            return hook(*args, **kwargs)
        except tolerance.error as error:
            warnings.warn(  # a rank-zero warning would never be seen: rank 0 has the loss
                f"{name} was passed over on rank {trainer.global_rank}, which has no outputs of the last layer now: "
                f"{type(error).__name__}: {error}",
                stacklevel=1,
            )
            return None

    return run


def _replace(owner: pl.LightningModule | pl.Callback, name: str, hook: Any) -> None:
    if not getattr(getattr(owner, name), "_lightning_zb", False):
        hook._lightning_zb = True
        setattr(owner, name, hook)
