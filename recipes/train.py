"""Train a language model on text as bytes: python recipes/train.py [group=file] [key=value], see conf/train.yaml."""

from __future__ import annotations

import math
import os
import sys
import warnings
from dataclasses import fields
from pathlib import Path

import hydra
import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `recipes` is not installed, and a script's path has only the script's folder

from recipes.jobs import failure_noted, read_failure, run_job  # noqa: E402
from recipes.summary import FILE_NAME, LEGEND, Summary, WriteSummary, format_table, read_summary  # noqa: E402
from recipes.typed_config import check_config  # noqa: E402


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(config: DictConfig) -> float | None:
    """Train, print the summary and write it to summary.json in the job's folder.

    Returns:
        The summary's value that a Hydra sweeper may minimise; None on other ranks than 0.
    """
    return run(config)


def run(config: DictConfig) -> float | None:
    """Do what a script's configuration asks for; a sweep's job in processes of its own, see `main`.

    Raises:
        ValueError: the objective is not a value of a summary.
    """
    names = [field.name for field in fields(Summary)]
    if config.objective not in names:
        raise ValueError(f"objective={config.objective!r} is not a value of a summary; write one of {', '.join(names)}")
    folder = Path(config.output_dir)
    environment = dict(os.environ)  # before Lightning adds the ranks and the port of its processes
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        return run_in_sweep(config, folder, environment)
    with failure_noted(folder):
        is_first = train(config).is_global_zero
    if not is_first:
        return None
    summary = read_summary(folder / FILE_NAME)
    print(format_table([summary]), LEGEND, f"Metrics, checkpoints and this summary are in {folder}", sep="\n", flush=True)
    if config.compare not in (None, summary.schedule):
        print(format_table([summary, run_again(config, environment)]), flush=True)
    return getattr(summary, config.objective)


def train(config: DictConfig) -> L.Trainer:
    """Build everything that the configuration names, and fit.

    Args:
        config: the composed configuration.

    Returns:
        The trainer after the fit.
    """
    check_config(config)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the windows are cut from memory
    warnings.filterwarnings("ignore", ".*LeafSpec.*")  # Lightning's own use of torch
    L.seed_everything(config.seed, workers=True, verbose=False)
    trainer = instantiate(config.trainer)
    trainer.callbacks.append(WriteSummary(config, Path(config.output_dir)))
    num_threads = config.threads or max(1, (os.cpu_count() or 1) // trainer.num_devices)
    torch.set_num_threads(num_threads)
    os.environ["OMP_NUM_THREADS"] = str(num_threads)  # for processes that are spawned and do not come through here
    trainer.fit(instantiate(config.model), instantiate(config.data), ckpt_path=config.resume)
    return trainer


def run_again(config: DictConfig, environment: dict[str, str]) -> Summary:
    """Run the same job with the schedule to compare with, in new processes.

    Args:
        config: this job's configuration.
        environment: of the new processes.

    Returns:
        The other job's summary.

    Raises:
        RuntimeError: it failed.
    """
    folder = Path(config.output_dir) / f"compare-{config.compare}"
    print(f"\nTo compare: the same {config.trainer.max_steps} steps with schedule {config.compare}", flush=True)
    overrides = [*HydraConfig.get().overrides.task, f"strategy.schedule={config.compare}", "compare=null"]
    if not run_job(overrides, folder, environment):
        raise RuntimeError(f"the comparison with {config.compare} failed: {read_failure(folder)}; compare=null leaves it out")
    return read_summary(folder / FILE_NAME)


def run_in_sweep(config: DictConfig, folder: Path, environment: dict[str, str]) -> float:
    """Run a sweep's job in processes of its own, without a comparison: the sweep's table compares.

    Args:
        config: the job's configuration.
        folder: of the job.
        environment: of the new processes.

    Returns:
        The value to minimise; infinity for a job that failed, so that the sweep goes on.
    """
    if not run_job([*HydraConfig.get().overrides.task, "compare=null"], folder, environment):
        print(f"This job failed: {read_failure(folder)}", flush=True)
        return math.inf
    value = getattr(read_summary(folder / FILE_NAME), config.objective)
    return math.inf if value is None else value


if __name__ == "__main__":
    main()
