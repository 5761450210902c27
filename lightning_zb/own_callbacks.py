"""The callbacks that a pipelined run needs beside the user's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.pytorch.callbacks import Callback

from lightning_zb.callback import ZeroBubbleCallback
from lightning_zb.late_metrics import LateMetrics
from lightning_zb.metrics import LossRankMetrics
from lightning_zb.plan_choice import Replan


def add_own_callbacks(callbacks: list[Callback], device: torch.device) -> None:
    """Put those that are missing in front of the user's, the one that shares metrics first.

    Args:
        callbacks: the Trainer's, changed in place; one that the user configured stays.
        device: where the model runs; on CUDA what is logged must not make the host wait.
    """
    if not any(isinstance(c, LossRankMetrics) for c in callbacks):
        callbacks.insert(0, LossRankMetrics())
    if not any(isinstance(c, ZeroBubbleCallback) for c in callbacks):
        callbacks.insert(1, ZeroBubbleCallback())
    if device.type == "cuda" and not any(isinstance(c, LateMetrics) for c in callbacks):
        callbacks.insert(1, LateMetrics())


def replan_of(callbacks: Sequence[Callback]) -> Replan:
    """What a plan with measured costs may change, as the Trainer's `ZeroBubbleCallback` says."""
    return next(c.replan for c in callbacks if isinstance(c, ZeroBubbleCallback))
