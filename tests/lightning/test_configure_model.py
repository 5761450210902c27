"""Models that configure_model builds; test_parity_processes.py trains some, each process its own layers alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch

from lightning_zb import ZeroBubbleStrategy
from lightning_zb.launching import _build_here
from tests.lightning.models import MODELS, dataset
from tests.lightning.processes import ROOT

SCRIPT = """
import sys, lightning as L, torch, lightning_zb
from tests.lightning.models import ConfiguredModule, Tokens

class Module(ConfiguredModule):
    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

if __name__ == "__main__":
    start_method, path = sys.argv[1:]
    L.seed_everything(5, verbose=False)
    plain = start_method == "plain"
    trainer = L.Trainer(
        accelerator="cpu", devices=1 if plain else 2, max_epochs=1, accumulate_grad_batches=2, logger=False,
        strategy="auto" if plain else lightning_zb.ZeroBubbleStrategy("zb-v", start_method=start_method),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    module = Module("llama")
    trainer.fit(module, torch.utils.data.DataLoader(Tokens(8), batch_size=2))
    weights = {key: value.clone() for key, value in module.state_dict().items()}
    tested = trainer.test(module, torch.utils.data.DataLoader(Tokens(4), batch_size=2), verbose=False)
    torch.save({"weights": weights, "tested": tested, "steps": trainer.global_step}, path)
"""


def test_a_model_built_again_is_refused():
    module = MODELS["rebuilding"]("llama")
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=ZeroBubbleStrategy(virtual_devices=2), accumulate_grad_batches=2, max_steps=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(dataset("configured", 2), batch_size=1)
    trainer.fit(module, loader)
    with pytest.raises(ValueError, match=r"built the model a second time.*if self\.model is not None: return"):
        trainer.validate(module, loader)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_the_starting_process_ends_with_the_trained_model(start_method: str, tmp_path: Path):
    """It has built nothing itself: configure_model ran in the processes that trained. A test follows the fit."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for method in ("plain", start_method):
        command = [sys.executable, str(tmp_path / "script.py"), method, str(tmp_path / f"{method}.pt")]
        result = subprocess.run(
            ["timeout", "-k", "1", "200", *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert result.returncode == 0, result.stdout
    plain, mine = (torch.load(tmp_path / f"{method}.pt") for method in ("plain", start_method))
    assert mine["weights"].keys() == plain["weights"].keys()
    assert [key for key, value in plain["weights"].items() if not torch.equal(value, mine["weights"][key])] == []
    assert mine["tested"] == plain["tested"]


def test_weights_without_a_place_are_said(tmp_path: Path):
    """A model that is built is left alone; the generator of the process too, where it is built."""
    module = MODELS["configured"]("llama")
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    torch.save({"lost.weight": torch.zeros(1)}, tmp_path / "weights.ckpt")
    before = torch.get_rng_state()
    with pytest.warns(UserWarning, match=r"1 trained weights \(lost\.weight and so on\) have no place"):
        _build_here(trainer, str(tmp_path / "weights.ckpt"))
    assert module.model is not None
    assert torch.equal(torch.get_rng_state(), before)
    model = module.model
    torch.save(module.state_dict(), tmp_path / "weights.ckpt")
    _build_here(trainer, str(tmp_path / "weights.ckpt"))
    assert module.model is model
