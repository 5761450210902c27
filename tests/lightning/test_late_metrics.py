"""What is logged reaches loggers and progress bar without the host waiting for it between two steps."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import CSVLogger

import lightning_zb
from lightning_zb.late_metrics import LateMetrics
from lightning_zb.local_devices import LocalDevices
from tests.lightning.fitting import users_log
from tests.lightning.models import TokenModule, dataset

WAITING = ("item", "__float__", "__bool__", "__int__", "tolist", "numpy", "cpu")
"""Tensor methods for which the host waits, where the tensor is on a device."""


class Waits:
    """Notes which waiting methods are called between the end of one step's schedule and the start of the next."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.is_between = False
        self.arrived: set[int] = set()
        for name in WAITING:
            patch.setattr(torch.Tensor, name, self._noting(name, getattr(torch.Tensor, name)))
        run = LocalDevices.run

        def running(*args: Any) -> None:
            self.is_between = False
            run(*args)
            self.is_between = True

        patch.setattr(LocalDevices, "run", running)

    def _noting(self, name: str, method: Any) -> Any:
        def noting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.is_between and id(tensor) not in self.arrived:
                self.names.append(name)
            return method(tensor, *args, **kwargs)

        return noting


class Copy:
    """A copy to the host that has not arrived before the next step has run."""

    num_steps = 0
    waits: Waits | None = None

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.step = tensor.clone(), Copy.num_steps

    def get(self) -> torch.Tensor:
        assert Copy.num_steps > self.step, "the host waits for a value of the step that has just been queued"
        if Copy.waits is not None:
            Copy.waits.arrived.add(id(self.tensor))
        return self.tensor


class Bar(ProgressBar):
    """Notes what a progress bar would show after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[dict[str, Any]] = []

    def disable(self) -> None:
        pass

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        shown = self.get_metrics(trainer, pl_module)
        if trainer.strategy.is_between_steps:
            self.shown.append({k: v for k, v in shown.items() if k != "v_num"})


class Counting(L.Callback):
    """Counts steps as they begin."""

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.strategy.is_between_steps:
            Copy.num_steps += 1

    def on_train_epoch_end(self, *_: Any) -> None:  # where values are waited for
        Copy.num_steps += 1
        assert Copy.waits is not None
        Copy.waits.is_between = False


class Module(TokenModule):
    def log(self, name: str, value: Any, **options: Any) -> None:
        super().log(name, value, **{**options, "on_step": True, "prog_bar": True})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(directory, name, callbacks, patch):
    L.seed_everything(5, verbose=False)
    module, bar = Module(), Bar()
    waits = Waits(patch)
    Copy.num_steps, Copy.waits = 0, waits
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=lightning_zb.ZeroBubbleStrategy(virtual_devices=2, check_data_steps=0),
        accumulate_grad_batches=4,
        max_steps=6,
        logger=CSVLogger(directory, name="", version=name),
        log_every_n_steps=1,
        callbacks=[Counting(), *callbacks, bar, lightning_zb.ZeroBubbleCallback(None, check_every=0)],
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(dataset("tokens", 48), batch_size=2))
    return waits, users_log((directory / name / "metrics.csv").read_text()), bar


def test_nothing_waits_for_the_device_between_steps(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        at_once, expected, bar = fit(tmp_path, "at_once", [], patch)
    assert "item" in at_once.names  # else the test could not fail
    late_metrics = LateMetrics(copy=Copy, is_there=lambda tensor: False)
    with pytest.MonkeyPatch.context() as patch:
        late, log, late_bar = fit(tmp_path, "late", [late_metrics], patch)
    assert late.names == []
    assert log == expected
    assert len(bar.shown) == len(late_bar.shown) == 6
    assert late_bar.shown[1:] == bar.shown[:-1]
