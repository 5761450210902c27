"""What all language models of the recipes share: the steps, the logged values, the optimizer."""

from __future__ import annotations

import math

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor


class LanguageModel(L.LightningModule):
    """A language model trained with AdamW, a linear warm-up and a cosine decay of the learning rate.

    Args:
        learning_rate: the highest rate, reached at the end of the warm-up.
        weight_decay: on matrices; vectors (biases, norms, decay rates of state spaces) are not decayed.
        num_warmup_steps: optimizer steps until the highest rate.
        final_rate: the last step's rate over the highest.
    """

    def __init__(
        self,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.1,
        num_warmup_steps: int = 20,
        final_rate: float = 0.1,
    ) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.num_warmup_steps = num_warmup_steps
        self.final_rate = final_rate

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The mean cross entropy of the next byte in nats.

        Args:
            batch: input_ids and labels, [batch, sequence] each.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define loss(batch)")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_bits_per_byte", loss / math.log(2), prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _rate(self, step: int) -> float:
        if step < self.num_warmup_steps:
            return (step + 1) / self.num_warmup_steps
        num_steps = self.trainer.estimated_stepping_batches
        progress = min(1.0, (step - self.num_warmup_steps) / max(1, num_steps - self.num_warmup_steps))
        return self.final_rate + (1 - self.final_rate) * (1 + math.cos(math.pi * progress)) / 2
