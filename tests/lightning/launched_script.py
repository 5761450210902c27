"""A user's script as every launcher starts it: two fits in one process, each followed by a test.

Arguments: folder for results, start method ("plain": the plain Trainer), devices of a node, nodes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
import torch

import lightning_zb
from tests.lightning.models import TokenModule, Tokens


class Module(TokenModule):
    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))


def main(directory: Path, start_method: str, devices: int, num_nodes: int) -> None:
    for run in range(2):
        L.seed_everything(5 + run, verbose=False)
        module = Module()
        strategy = "auto" if start_method == "plain" else lightning_zb.ZeroBubbleStrategy(start_method=start_method)
        trainer = L.Trainer(
            accelerator="cpu", devices=devices, num_nodes=num_nodes, strategy=strategy, max_epochs=1, accumulate_grad_batches=4,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(Tokens(32), batch_size=2, shuffle=True))
        tested = trainer.test(module, torch.utils.data.DataLoader(Tokens(8), batch_size=2), verbose=False)
        if start_method in ("spawn", "fork"):
            weights = module.state_dict()  # of the process that started the others
        else:
            path = directory / f"run{run}.ckpt"
            trainer.save_checkpoint(path)
            weights = torch.load(path, weights_only=True)["state_dict"]
        torch.save({"weights": weights, "tested": tested}, directory / f"run{run}.rank{trainer.global_rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
