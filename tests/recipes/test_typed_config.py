"""Wrong values are refused by the name of their key; everything in conf/ is right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recipes.typed_config import check_config
from tests.test_conf import FILES, STARTED_BY, composed, needed_by


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.max_steps=many", "trainer.max_steps='many' is not int"),
        ("+trainer.callbacks=[{_target_: recipes.progress.ProgressBar, leave: 3}]", "trainer.callbacks.0.leave=3 is not bool"),
        ("trainer.precision=32-tru", "trainer.precision='32-tru' is not"),
        ("data.batch_size=1.5", "data.batch_size=1.5 is not int"),
        ("data.read.hold_out_every=false", "data.read.hold_out_every=False is not int"),
        ("model.learning_rate=fast", "model.learning_rate='fast' is not float"),
        ("+callbacks.measurements.num_warmup_steps=null", "callbacks.measurements.num_warmup_steps=None is not int"),
        (
            "+model.rate=1",
            "model.rate: recipes.models.sequential.SequentialLanguageModel has no parameter 'rate'; it has",
        ),
        ("model=checkpoint", "model.path=None is not str"),
        ("+data.path=x", "data.path: recipes.data.ByteDataModule has no parameter 'path'"),
    ],
)
def test_wrong_values_are_named(override, message, tmp_path):
    config = composed(tmp_path, "strategy=plain", "model=sequential", "+data.read.hold_out_every=20", override)
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        check_config(config)


@pytest.mark.parametrize("override", ["model.learning_rate=1", "data.num_validation_windows=null", "trainer.devices=auto"])
def test_other_right_values_pass(override, tmp_path):
    check_config(composed(tmp_path, "strategy=plain", "model=sequential", override))


@pytest.mark.parametrize("file", FILES)
def test_every_file_passes(file, tmp_path, monkeypatch):
    for name, value in STARTED_BY.get(file, {}).items():
        monkeypatch.setenv(name, value)
    group, name = file.split("/")
    check_config(composed(tmp_path, f"{group}={name}", *needed_by(file, Path("texts"), Path("checkpoint"))))
