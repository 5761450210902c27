"""What is logged in a training step reaches loggers and progress bar one step late, so that the host need not wait for it.

Lightning turns a logged loss into a number right after the step, and the host waits until the device has computed it: in
that time it queues none of the next step's work. Here the value starts on its way to pinned memory instead, and is read
when the next step has ended. Values that are on the host already are logged at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_zb.execution.host_copy import HostCopy, copy_to_host


@dataclass(frozen=True, slots=True)
class _Row:
    """What a step logged.

    Args:
        values: on their way to the host.
        step: of the loggers.
        epoch: in which it was logged.
    """

    values: dict[str, HostCopy]
    step: int
    epoch: int


@dataclass(slots=True)
class _Shown:
    """A metric of the progress bar.

    Args:
        source: the tensor whose copy is under way; a later one takes its place.
        copy: its copy.
        value: what is shown, of the step before; None in the first.
    """

    source: Tensor
    copy: HostCopy
    value: float | None = None


class LateMetrics(Callback):
    """Stands in for the parts of Lightning's logger connector that wait for the device; the strategy adds it on CUDA.

    Args:
        copy: how values reach the host.
        is_there: whether a value is on the host already.
    """

    def __init__(
        self, copy: Callable[[Tensor], HostCopy] = copy_to_host, is_there: Callable[[Tensor], bool] = lambda t: t.is_cpu
    ) -> None:
        self._copy, self._is_there = copy, is_there
        self._rows: list[_Row] = []
        self._shown: dict[str, _Shown] = {}

    # -- Lightning's calls -----------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: pl.LightningModule, stage: str) -> None:
        connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
        if stage != "fit" or "log_metrics" in vars(connector):
            return
        self._trainer, self._log_now, self._metrics_now = trainer, connector.log_metrics, results.metrics
        connector.log_metrics, results.metrics = self._log, self._metrics

    def teardown(self, trainer: Any, pl_module: pl.LightningModule, stage: str) -> None:
        connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
        for replaced, name in ((connector, "log_metrics"), (results, "metrics")):
            if getattr(vars(replaced).get(name), "__self__", None) is self:
                delattr(replaced, name)

    def on_train_batch_end(self, trainer: Any, pl_module: pl.LightningModule, *_: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            self.deliver()

    def on_validation_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        self.deliver()

    def on_train_epoch_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        self.deliver()

    def on_train_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        self.deliver()

    def on_exception(self, trainer: Any, pl_module: pl.LightningModule, exception: BaseException) -> None:
        with suppress(RuntimeError):  # of a device that failed; the exception says so
            self.deliver()

    # -- loggers ---------------------------------------------------------------------------------------------------

    def deliver(self) -> None:
        """Give the loggers what was logged so far, waiting for what is still under way."""
        rows, self._rows = self._rows, []
        for row in rows:
            values: dict[str, Any] = {name: copy.get().item() for name, copy in row.values.items()}
            step = row.step
            if "step" in values:
                step = int(values.pop("step"))
            else:
                values.setdefault("epoch", row.epoch)
            for logger in self._trainer.loggers:
                logger.log_metrics(metrics=values, step=step)
                logger.save()

    def _log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """In place of the connector's `log_metrics`."""
        connector = self._trainer._logger_connector
        is_step = self._trainer.training and connector._first_loop_iter is not None and step is None
        if not is_step or not metrics or not all(isinstance(value, Tensor) for value in metrics.values()):
            self.deliver()
            self._log_now(metrics, step)
        elif all(map(self._is_there, metrics.values())):
            self._log_now(metrics, step)
        elif self._trainer.loggers:
            connector._logged_metrics.update(metrics)
            values = {name: self._copy(value.detach()) for name, value in metrics.items()}
            step_now = self._trainer.fit_loop.epoch_loop._batches_that_stepped
            self._rows.append(_Row(values, step_now, self._trainer.current_epoch))

    # -- progress bar ----------------------------------------------------------------------------------------------

    def _metrics(self, on_step: bool) -> Any:
        """In place of the results' `metrics`, which makes numbers of what the progress bar shows."""
        results = self._trainer.fit_loop.epoch_loop._results
        shown = [r for _, r in results.valid_items() if r.meta.prog_bar and self._is_late(r)] if on_step else []
        for result in shown:
            result.meta.prog_bar = False
        try:
            metrics = self._metrics_now(on_step)
        finally:
            for result in shown:
                result.meta.prog_bar = True
        for result in shown:
            _, name = results._forked_name(result, on_step)
            value = self._value_before(name, result._forward_cache)
            if value is not None:
                metrics["pbar"][name] = value
        return metrics

    def _is_late(self, result: Any) -> bool:
        value = result._forward_cache
        return result.meta.on_step and isinstance(value, Tensor) and not self._is_there(value)

    def _value_before(self, name: str, source: Tensor) -> float | None:
        """The value that was logged before this one; nothing waits for this one."""
        shown = self._shown.get(name)
        if shown is None or shown.source is not source:
            before = None if shown is None else shown.copy.get().item()
            shown = self._shown[name] = _Shown(source, self._copy(source.detach()), before)
        return shown.value
