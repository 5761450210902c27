"""What ends training before its time: `trainer.should_stop` set by user code, and SIGTERM.

Code after the layers runs on the loss rank alone, so a module that stops training on its own would leave the other ranks
waiting. Lightning's callbacks decide on every rank; where other code mentions `should_stop`, the ranks agree after each
step, which costs a barrier a step, and are told so.

Lightning's handler of SIGTERM enters a collective, wherever its process is, and waits for processes that wait for it;
and its loops ask each other every batch. Here a process that got the signal ends after its batch, those that it started
get it too, and all others lose a peer.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from types import CodeType, FunctionType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_zb.first_failure import what_happened

log = logging.getLogger("lightning.pytorch.zero_bubble")


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


def end_on_sigterm(trainer: Any) -> None:
    """Let SIGTERM end this process after its batch, without a collective.

    Args:
        trainer: has not registered its signal handlers yet.
    """

    def note(signum: int, frame: Any) -> None:
        if not trainer.received_sigterm:
            log.info("rank %d received SIGTERM and ends after this batch", trainer.global_rank)
            if trainer.strategy.launcher is not None:  # a spawned process has none
                trainer.strategy.launcher.kill(signum)
        trainer._signal_connector.received_sigterm = True

    trainer._signal_connector._sigterm_notifier_fn = note
    # a collective and a host synchronisation every batch
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def name_signal(exception: BaseException, rank: int) -> None:
    """Say on rank 0 which signal ended it, after what callbacks had to say: Lightning ends it without a traceback.

    Args:
        exception: what ended this process's run.
        rank: of this process.
    """
    if rank == 0 and isinstance(exception, (SIGTERMException, KeyboardInterrupt)):
        print(f"[zero_bubble] rank {rank} {what_happened(exception)}", file=sys.stderr, flush=True)


def _mentions_should_stop(kind: type) -> bool:
    users = [c for c in kind.__mro__ if not c.__module__.startswith(("lightning.", "pytorch_lightning.", "torch."))]
    functions = [f for c in users for f in vars(c).values() if isinstance(f, FunctionType)]
    return any("should_stop" in code.co_names for f in functions for code in _codes(f.__code__))


def _codes(code: CodeType) -> Iterable[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
