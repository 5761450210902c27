"""Models that configure_model builds; test_parity_processes.py trains some, each process its own layers alone."""

from __future__ import annotations

import lightning as L
import pytest
import torch

from lightning_zb import ZeroBubbleStrategy
from tests.lightning.models import MODELS, dataset


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
