"""One rank of the callback's test: layers of known times, unevenly cut at first, one of them slower from some step on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch

import lightning_zb
from tests.lightning.emulated import SleepingModule
from tests.lightning.models import Vectors

HEAVY, LIGHT = (20.0, 30.0, 25.0), (8.0, 10.0, 9.0)
SLOW = (14, 7, 8.0)  # from step 14 on layer 7 takes eight times as long
STEPS, MICROBATCHES = 32, 6


class Watch(lightning_zb.ZeroBubbleCallback):
    """Notes each measured step beside the prediction of the plan that ran."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.verified: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, *args: Any) -> None:
        before, plan = self.profile, trainer.strategy.plan
        super().on_train_batch_end(trainer, *args)
        if self.profile is not before and self.profile is not None:
            measured = self.profile.timeline
            self.verified.append(
                {
                    "step": trainer.global_step,
                    "predicted": plan.predicted.makespan,
                    "measured": measured.makespan,
                    "chunks": [len(chunk) for chunk in plan.partition.chunks],
                }
            )


def main(directory: Path, rank: str) -> None:
    torch.set_num_threads(1)
    import faulthandler

    faulthandler.dump_traceback_later(90, repeat=False)
    module = SleepingModule([HEAVY] * 4 + [LIGHT] * 4, slow=SLOW)
    callback = Watch(profile_steps=(1, 4), replan="partition", check_every=3, min_gain=0.05, background=False)
    strategy = lightning_zb.ZeroBubbleStrategy(schedule="zb", memory_budget=2.0)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, callbacks=[callback],
        accumulate_grad_batches=MICROBATCHES, max_steps=STEPS, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, logger=L.pytorch.loggers.CSVLogger(directory, name="", version="run"), log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(Vectors(STEPS * MICROBATCHES), batch_size=1))
    result = {
        "verified": callback.verified,
        "decisions": [(d.step, d.change, d.reason) for d in callback.decisions],
        "drifts": callback.num_drifts,
    }
    (directory / f"result{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
