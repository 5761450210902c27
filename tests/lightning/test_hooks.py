"""Hooks of the module that the strategy wraps."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch

from lightning_zb import ZeroBubbleStrategy, hooks
from tests.lightning.bad_modules import TwoOptimizers
from tests.lightning.models import SequentialModule, dataset


def test_a_module_that_goes_to_another_trainer_shares_that_ones_metrics(monkeypatch):
    shared: list[Any] = []
    monkeypatch.setattr(hooks, "share_metrics", shared.append)
    module = SequentialModule()
    trainers = [SimpleNamespace(strategy=SimpleNamespace(has_loss=True)) for _ in range(2)]
    for trainer in trainers:
        module._trainer = trainer
        hooks.adapt_hooks(module)
        module.on_train_epoch_end()
    assert [trainer is trainers[1] for trainer in shared] == [False, False, True, True]


class ReadsMetric(L.Callback):
    def __init__(self, key: str = "loss") -> None:
        self.key, self.seen = key, []

    def on_train_batch_end(self, trainer, *_: Any) -> None:
        self.seen.append(trainer.callback_metrics[self.key])


class FailsFirst(ReadsMetric):
    def on_train_batch_start(self, trainer, *_: Any) -> None:
        raise RuntimeError("of its own")


def callback_of(has_loss: bool, is_between_steps: bool) -> tuple[FailsFirst, SimpleNamespace]:
    """A callback as a rank has it, and its trainer without metrics."""
    callback = FailsFirst()
    strategy = SimpleNamespace(has_loss=has_loss, is_between_steps=is_between_steps)
    trainer = SimpleNamespace(strategy=strategy, callbacks=[callback], callback_metrics={}, global_rank=1)
    hooks.adapt_callbacks(trainer)
    return callback, trainer


@pytest.mark.parametrize(("has_loss", "is_between_steps"), [(False, True), (False, False), (True, False)])
def test_callbacks_that_miss_a_metric_are_passed_over_where_it_cannot_be(has_loss: bool, is_between_steps: bool):
    callback, trainer = callback_of(has_loss, is_between_steps)
    with pytest.warns(UserWarning, match=r"FailsFirst.on_train_batch_end was passed over on rank 1, .*KeyError: 'loss'"):
        callback.on_train_batch_end(trainer)
    trainer.callback_metrics["loss"] = 2.0
    callback.on_train_batch_end(trainer)
    assert callback.seen == [2.0]
    with pytest.raises(RuntimeError, match="of its own"):
        callback.on_train_batch_start(trainer)


def test_callbacks_that_miss_a_metric_fail_where_it_should_be():
    callback, trainer = callback_of(has_loss=True, is_between_steps=True)
    with pytest.raises(KeyError, match="loss"):
        callback.on_train_batch_end(trainer)


def test_evaluation_in_the_middle_of_a_step_hides_no_error_of_the_loss_rank():
    """Microbatches of training are queued then, but evaluation has its outputs."""

    class FailsInEvaluation(L.Callback):
        def on_validation_batch_end(self, *_: Any) -> None:
            raise KeyError("of its own")

    callback = FailsInEvaluation()
    strategy = SimpleNamespace(has_loss=True, is_between_steps=False)
    trainer = SimpleNamespace(strategy=strategy, callbacks=[callback], global_rank=0)
    hooks.adapt_callbacks(trainer)
    with pytest.raises(KeyError, match="of its own"):
        callback.on_validation_batch_end(trainer)
    strategy.has_loss = False
    with pytest.warns(UserWarning, match="passed over"):
        callback.on_validation_batch_end(trainer)


def test_callbacks_that_read_metrics_at_batch_ends_train_with_any_trainer():
    """As a plain Trainer runs them, whose metrics are there from the first batch on."""
    callback, module = ReadsMetric("train_loss"), SequentialModule()
    batches = torch.utils.data.DataLoader(dataset("sequential", 16), batch_size=2)
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 2,
        "logger": False,
        "enable_progress_bar": False,
    }
    options |= {"enable_checkpointing": False, "enable_model_summary": False, "accumulate_grad_batches": 4}
    with pytest.warns(UserWarning, match="passed over on rank 0, which has no outputs of the last layer now"):
        L.Trainer(**options, strategy=ZeroBubbleStrategy(virtual_devices=2), callbacks=callback).fit(module, batches)
    assert len(callback.seen) == 1 + 4
    L.Trainer(**options, callbacks=callback).fit(module, batches)
    assert len(callback.seen) == 1 + 4 + 8


def test_two_optimizers_are_refused_where_they_are_made():
    """Ahead of Lightning's own check, which would advise manual optimization."""
    module = TwoOptimizers()
    hooks.adapt_hooks(module)
    with pytest.raises(ValueError, match="returned 2 optimizers; the zero_bubble strategy trains with one"):
        module.configure_optimizers()
    module._trainer = SimpleNamespace(strategy=object())  # type: ignore[assignment]
    assert len(module.configure_optimizers()) == 2  # with a strategy that steps them all
    one = SequentialModule()
    hooks.adapt_hooks(one)
    assert isinstance(one.configure_optimizers()["optimizer"], torch.optim.Optimizer)


class _OwnHooks(SequentialModule):
    """Hooks of the class, and one that is set on the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.on_train_batch_start = lambda *_: None

    def on_train_batch_end(self, *_: Any) -> None:
        pass


def test_after_a_run_module_and_callbacks_have_their_own_hooks():
    """Whatever runs them next, another strategy too, sees no more than what the user wrote."""
    module, callback = _OwnHooks(), FailsFirst()
    module.embedding = torch.nn.Linear(2, 2)  # outside the layers
    module.model[1].forward = of_layer = partial(torch.nn.Sequential.forward, module.model[1])
    before = {name: set(vars(m)) for name, m in module.named_modules() if name}
    own = module.on_train_batch_start
    callback.on_train_batch_end = callback.on_train_batch_start = theirs = lambda *_: None
    for stage in ("fit", "validate"):
        strategy = ZeroBubbleStrategy(virtual_devices=2)
        trainer = L.Trainer(
            accelerator="cpu", devices=1, strategy=strategy, max_steps=1, accumulate_grad_batches=2, callbacks=[callback],
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        getattr(trainer, stage)(module, torch.utils.data.DataLoader(dataset("sequential", 8), batch_size=2))
        assert module.on_train_batch_start is own
        assert not hasattr(module.on_train_batch_end, "_lightning_zb")
        assert not any(hasattr(value, "_lightning_zb") for value in vars(module).values())
        assert not any(hasattr(value, "_lightning_zb") for value in vars(callback).values())
        assert callback.on_train_batch_start is callback.on_train_batch_end is theirs
        assert {name: set(vars(m)) for name, m in module.named_modules() if name} == before
        assert module.model[1].forward is of_layer
