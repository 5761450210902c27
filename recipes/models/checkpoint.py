"""Causal language models from a local folder in Hugging Face's format, and back into one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from torch import Tensor

from recipes.models.language_model import LanguageModel


class CheckpointLanguageModel(LanguageModel):
    """A pretrained model that trains on.

    Args:
        path: the folder; nothing is looked for elsewhere.
        dtype: of its parameters.
        options: the optimizer's options, see LanguageModel.

    Raises:
        FileNotFoundError: it is not the folder of a model.
    """

    def __init__(self, path: str, dtype: str = "float32", **options: Any) -> None:
        super().__init__(**options)
        if not (Path(path) / "config.json").is_file():
            raise FileNotFoundError(
                f"checkpoint={path!r} has no config.json; give the folder of a model in Hugging Face's format"
            )
        auto = transformers.AutoModelForCausalLM
        if torch.get_default_device().type == "meta":  # names and shapes are enough
            self.model = auto.from_config(transformers.AutoConfig.from_pretrained(path, local_files_only=True))
        else:
            self.model = auto.from_pretrained(path, dtype=dtype, local_files_only=True)
        self.model.train()  # it comes in evaluation mode
        self.model.config.use_cache = False

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)  # of a token, not of a byte


class SavePretrained(L.Callback):
    """Saves the trained model in Hugging Face's format when training ends.

    Args:
        folder: where to.
        tokenizer: folder of the tokenizer to save beside the model; None for none.
    """

    def __init__(self, folder: str, tokenizer: str | None = None) -> None:
        self.folder = folder
        self.tokenizer = tokenizer

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        weights = trainer.strategy.lightning_module_state_dict()  # a collective: each process holds its layers only
        if not trainer.is_global_zero:
            return
        model: Any = pl_module.model
        own = {key.removeprefix("model."): value for key, value in weights.items() if key.startswith("model.")}
        model.save_pretrained(self.folder, state_dict=own)
        if self.tokenizer is not None:
            transformers.AutoTokenizer.from_pretrained(self.tokenizer, local_files_only=True).save_pretrained(self.folder)
        print(f"\nThe trained model is in {self.folder}", flush=True)
