"""`trainer.should_stop`, set by user code on one rank, ends training on all of them after the same step.

Code after the layers runs on the loss rank alone, so a module that stops training on its own would leave the other ranks
waiting. Lightning's callbacks decide on every rank; where other code mentions `should_stop`, the ranks agree after each
step, which costs a barrier a step, and are told so.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import CodeType, FunctionType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn


def agree_on_stops(trainer: Any, module: pl.LightningModule) -> None:
    """Let ranks agree on `trainer.should_stop` after each step, where user code may set it.

    Args:
        trainer: about to fit.
        module: the user's LightningModule.
    """
    loop = trainer.fit_loop.epoch_loop
    writers = [type(o).__name__ for o in (module, *trainer.callbacks) if _mentions_should_stop(type(o))]
    if not writers or trainer.world_size == 1 or "on_advance_end" in vars(loop):
        return
    rank_zero_warn(
        f"{', '.join(writers)} sets trainer.should_stop, so the devices agree on it after every step and wait for each "
        "other; lightning.pytorch.callbacks.EarlyStopping stops training without that"
    )
    original = loop.on_advance_end

    def on_advance_end(*args: Any) -> None:
        if trainer.strategy.is_between_steps:
            trainer.should_stop = trainer.strategy.reduce_boolean_decision(trainer.should_stop, all=False)
        original(*args)

    loop.on_advance_end = on_advance_end


def _mentions_should_stop(kind: type) -> bool:
    users = [c for c in kind.__mro__ if not c.__module__.startswith(("lightning.", "pytorch_lightning.", "torch."))]
    functions = [f for c in users for f in vars(c).values() if isinstance(f, FunctionType)]
    return any("should_stop" in code.co_names for f in functions for code in _codes(f.__code__))


def _codes(code: CodeType) -> Iterable[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
