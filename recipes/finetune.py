"""Train a Hugging Face model on: python recipes/finetune.py checkpoint=FOLDER data.read.path=TEXTS, see conf/finetune.yaml."""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `recipes` is not installed

from recipes.train import run


@hydra.main(version_base="1.3", config_path="../conf", config_name="finetune")
def main(config: DictConfig) -> float | None:
    """Fine-tune as recipes/train.py trains, and save the model in the format it came in.

    Returns:
        The summary's value that a Hydra sweeper may minimise; None on other ranks than 0.
    """
    return run(config)


if __name__ == "__main__":
    main()
