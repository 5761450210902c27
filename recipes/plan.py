"""Plan without training: python recipes/plan.py [model=file] [key=value], see conf/plan.yaml."""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `recipes` is not installed

from recipes.typed_config import check_config


@hydra.main(version_base="1.3", config_path="../conf", config_name="plan")
def main(config: DictConfig) -> float:
    """Plan every schedule for one model or costs file.

    Returns:
        The fastest plan's predicted step time, which a Hydra sweeper may minimise.
    """
    check_config(config)
    with torch.device("meta"):  # shapes are enough, and the largest model costs no memory
        job = instantiate(config)
    return job.run()[0].predicted.step_time


if __name__ == "__main__":
    main()
