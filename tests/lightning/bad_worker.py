"""One rank of a run that must fail. Arguments: directory, name of the case ('setup': all of AT_SETUP), rank."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path

import lightning as L
import torch

import lightning_zb
from tests.lightning.bad_modules import AT_SETUP, IN_STEP
from tests.lightning.models import dataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


def fit(module: L.LightningModule, **options) -> None:
    L.seed_everything(3, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, max_epochs=2, accumulate_grad_batches=4, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, strategy=lightning_zb.ZeroBubbleStrategy(**options),
    )  # fmt: skip
    kind = "tokens" if hasattr(module, "net") else "sequential"
    trainer.fit(module, torch.utils.data.DataLoader(dataset(kind, 32), batch_size=2, shuffle=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    directory, name, rank = sys.argv[1:4]
    if name != "setup":
        fit(IN_STEP[name][0]())
        sys.exit(0)
    messages = {}
    for case, (module, options, _) in AT_SETUP.items():
        try:
            fit(module(), **options)
        except Exception as error:
            messages[case] = str(error)
    (Path(directory) / f"messages{rank}.json").write_text(json.dumps(messages))
    fit(AT_SETUP["no stack"][0]())  # uncaught: the exit code
