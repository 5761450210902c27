"""Train a language model on text as bytes: python recipes/train.py [group=file] [key=value], see conf/train.yaml."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import hydra
import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `recipes` is not installed, and a script's path has only the script's folder

from recipes.summary import FILE_NAME, Summary, format_table, read_summary, summarize  # noqa: E402
from recipes.typed_config import check_config  # noqa: E402


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(config: DictConfig) -> float | None:
    """Train, print the summary and write it to summary.json in the job's folder.

    Returns:
        The validation loss, which a Hydra sweeper may minimise; None on other ranks than 0.
    """
    environment = dict(os.environ)  # before Lightning adds the ranks and the port of its processes
    trainer = train(config)
    if not trainer.is_global_zero:
        return None
    summary = summarize(trainer, config)
    summary.write(Path(config.output_dir))
    print(format_table([summary]), flush=True)
    if config.compare is not None:
        print(format_table([summary, run_again(config, environment)]), flush=True)
    return summary.val_loss


def train(config: DictConfig) -> L.Trainer:
    """Build everything that the configuration names, and fit.

    Args:
        config: the composed configuration.

    Returns:
        The trainer after the fit.
    """
    check_config(config)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the windows are cut from memory
    warnings.filterwarnings("ignore", ".*sync_dist=True.*")  # the loss is whole on the rank that logs it
    warnings.filterwarnings("ignore", ".*LeafSpec.*")  # Lightning's own use of torch
    L.seed_everything(config.seed, workers=True, verbose=False)
    trainer = instantiate(config.trainer)
    torch.set_num_threads(config.threads or max(1, (os.cpu_count() or 1) // trainer.num_devices))
    trainer.fit(instantiate(config.model), instantiate(config.data))
    return trainer


def run_again(config: DictConfig, environment: dict[str, str]) -> Summary:
    """Run the same job with the schedule to compare with, in new processes.

    Args:
        config: this job's configuration.
        environment: of the new processes.

    Returns:
        The other job's summary.
    """
    folder = Path(config.output_dir) / f"compare-{config.compare}"
    print(f"\nTo compare: the same {config.trainer.max_steps} steps with schedule {config.compare}", flush=True)
    overrides = [*HydraConfig.get().overrides.task, f"strategy.schedule={config.compare}", "compare=null"]
    command = [sys.executable, __file__, *overrides, f"hydra.run.dir={folder}"]
    subprocess.run(command, env=environment, check=True)
    return read_summary(folder / FILE_NAME)


if __name__ == "__main__":
    main()
