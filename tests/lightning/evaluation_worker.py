"""One rank of an evaluation test: fits, validates, tests and predicts with metrics in the module, and saves what it saw."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from tests.lightning.models import VOCABULARY, TokenModule, Tokens


class MeasuredModule(TokenModule):
    """Metrics, lists of outputs and epoch-end hooks as users write them; nothing in it knows of ranks."""

    def __init__(self, stop_after: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stop_after = stop_after
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=VOCABULARY)
        self.means = torchmetrics.MetricCollection({"mean": torchmetrics.MeanMetric(), "max": torchmetrics.MaxMetric()})
        self.train_losses: list[torch.Tensor] = []
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.train_losses.append(loss.detach())
        if self.global_step == self.stop_after and (batch_idx + 1) % 4 == 0:
            self.trainer.should_stop = True
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("epoch_max", torch.stack(self.train_losses).max())
        self.train_losses.clear()

    def _evaluate(self, batch, prefix: str) -> torch.Tensor:
        logits = self.net(batch["input_ids"])
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), batch["labels"][:, 1:].reshape(-1))
        self.accuracy(logits[:, :-1].reshape(-1, VOCABULARY), batch["labels"][:, 1:].reshape(-1))
        self.means.update(loss)
        self.log(f"{prefix}_loss", loss, sync_dist=True)
        self.log(f"{prefix}_accuracy", self.accuracy)
        self.losses.append(self.all_gather(loss))
        return loss

    def validation_step(self, batch, batch_idx):
        return self._evaluate(batch, "val")

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0) -> None:
        assert outputs.isfinite()

    def on_validation_epoch_end(self) -> None:
        self.log("val_stacked", torch.stack(self.losses).mean())
        self.log_dict({f"val_{k}": v for k, v in self.means.compute().items()})
        self.means.reset()
        self.losses.clear()

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        return self._evaluate(batch, "test")

    def on_test_epoch_end(self) -> None:
        self.log("test_stacked", torch.stack(self.losses).mean())
        self.losses.clear()

    def predict_step(self, batch, batch_idx):
        return {"tokens": self.net(batch["input_ids"]).argmax(-1)}


class PlateauModule(MeasuredModule):
    """Its learning rate falls where the validation loss stalls; monitored on every rank."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


RUNS: dict[str, dict[str, Any]] = {
    "metrics": {},
    "intervals": {"val_check_interval": 8, "limit_train_batches": 20, "limit_val_batches": 1, "num_sanity_val_steps": 1},
    "stopped": {"module": {"stop_after": 3}, "max_epochs": 4},
    "plateau": {"plateau": True, "max_epochs": 4},
    "fast": {"fast_dev_run": 4},
    "timed": {"max_time": "00:01:00:00", "overfit_batches": 8},
}


def run(name: str, devices: int, schedule: str | None, directory: Path) -> dict[str, Any]:
    """Everything a script reads after fit, validate, test and predict."""
    import lightning_zb

    options = dict(RUNS[name])
    kind = PlateauModule if options.pop("plateau", False) else MeasuredModule
    L.seed_everything(5, verbose=False)
    module = kind(**options.pop("module", {}))
    checkpoint = ModelCheckpoint(directory / "checkpoints", "{epoch}-{val_loss:.6f}", "val_loss", save_top_k=2, save_last=True)
    steps = ModelCheckpoint(directory / "steps", "{step}-{train_loss_step:.6f}", every_n_train_steps=2, save_top_k=-1)
    stopping = EarlyStopping("val_stacked", patience=1, min_delta=0.4)
    strategy = {"strategy": lightning_zb.ZeroBubbleStrategy(schedule=schedule)} if schedule else {}
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, accumulate_grad_batches=4, log_every_n_steps=1, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[checkpoint, steps, stopping, LearningRateMonitor()],
        logger=CSVLogger(directory, name="", version="log"), **strategy, **{"max_epochs": 2, **options},
    )  # fmt: skip

    def load(size: int, shuffle: bool = False):
        return torch.utils.data.DataLoader(Tokens(size), batch_size=2, shuffle=shuffle)

    trainer.fit(module, load(48, True), load(8))
    seen: dict[str, Any] = {
        "steps": trainer.global_step,
        "fit": numbers(trainer.callback_metrics),
        "epoch": trainer.current_epoch,
    }
    seen["files"] = sorted(p.name for p in directory.glob("*/*.ckpt")) if trainer.is_global_zero else None
    seen["best"] = (Path(checkpoint.best_model_path).name, numbers({"score": checkpoint.best_model_score}))
    seen["validate"] = [numbers(result) for result in trainer.validate(module, load(8), verbose=False)]
    seen["test"] = [numbers(result) for result in trainer.test(module, [load(8), load(4)], verbose=False)]
    seen["after_test"] = numbers(trainer.callback_metrics)
    seen["predict"] = [p["tokens"] for p in trainer.predict(module, load(6)) or []]
    return seen


def numbers(values: dict[str, Any]) -> dict[str, float]:
    """Metrics as floats, without the pipeline's own."""
    return {k: float(v) for k, v in values.items() if v is not None and not k.startswith("zb/")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    target, specs, rank = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    for spec in specs.split(","):
        run_name, run_schedule = spec.split(":")
        torch.save(run(run_name, 2, run_schedule, target / spec), target / f"{spec}.{rank}.pt")
