"""A callback that lets a run fail in one of its processes."""

from __future__ import annotations

import os
import signal
from typing import Any

import lightning as L


class Fault(L.Callback):
    """Fails after the first optimizer step.

    Args:
        deed: `raise` or `kill`, and on which rank, as `raise@1`; `none` for neither.
    """

    def __init__(self, deed: str) -> None:
        self.deed, _, self.rank = deed.partition("@")

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 0 or str(trainer.global_rank) != self.rank:
            return
        if self.deed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(f"something is wrong on rank {self.rank}")
