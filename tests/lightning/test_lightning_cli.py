"""LightningCLI: the strategy by its class path in a YAML file, with typed options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from torch.utils.data import DataLoader

from lightning_zb import ZeroBubbleStrategy
from tests.lightning.models import SequentialModule, Vectors

pytest.importorskip("jsonargparse", reason="extra cli")

CONFIG = """
seed_everything: 5
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 1
  accumulate_grad_batches: 4
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy:
    class_path: lightning_zb.ZeroBubbleStrategy
    init_args:
      schedule: zb-h1
      memory_budget: 1.5
      partition: balanced
      virtual_devices: 2
model:
  num_blocks: 6
"""


class VectorsData(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Vectors(16), batch_size=2)


def fit(folder: Path, config: dict[str, Any]) -> L.Trainer:
    from lightning.pytorch.cli import LightningCLI

    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    arguments = ["fit", f"--config={folder / 'config.yaml'}"]
    return LightningCLI(SequentialModule, VectorsData, args=arguments, save_config_callback=None).trainer


def test_strategy_from_yaml_trains_to_the_bits_of_the_plain_trainer(tmp_path):
    config = yaml.safe_load(CONFIG)
    trainer = fit(tmp_path, config)
    strategy = trainer.strategy
    assert isinstance(strategy, ZeroBubbleStrategy)
    request = strategy.plan_request
    assert (request.schedule, request.memory_budget, request.partition) == ("zb-h1", 1.5, "balanced")
    del config["trainer"]["strategy"]
    plain = fit(tmp_path, config).lightning_module.state_dict()
    weights = trainer.lightning_module.state_dict()
    assert weights.keys() == plain.keys()
    assert all(torch.equal(weights[key], plain[key]) for key in plain)


@pytest.mark.parametrize(("option", "value"), [("memory", 1.5), ("virtual_devices", "two")])
def test_wrong_options_are_named(option, value, tmp_path, capsys):
    config = yaml.safe_load(CONFIG)
    config["trainer"]["strategy"]["init_args"][option] = value
    with pytest.raises(SystemExit):
        fit(tmp_path, config)
    assert option in capsys.readouterr().err
