"""The jobs of a sweep, read back from their folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes.jobs import read_failure
from recipes.summary import FILE_NAME, Summary, read_summary


@dataclass(frozen=True, slots=True)
class Job:
    """One job of a sweep.

    Args:
        name: of its folder, below the sweep's.
        config: what it was asked to do.
        overrides: what was said on the command line.
        summary: what it achieved; None where it did not end well.
        failure: why it did not; None where it did.
    """

    name: str
    config: DictConfig
    overrides: tuple[str, ...]
    summary: Summary | None
    failure: str | None

    @property
    def schedule(self) -> str:
        """The schedule that was asked for; plain for Lightning's own strategy."""
        return str(OmegaConf.select(self.config, "strategy.schedule", default="plain"))

    @property
    def memory_budget(self) -> Any:
        """The budget that was asked for; None for what is left."""
        return OmegaConf.select(self.config, "strategy.memory_budget")

    @property
    def devices(self) -> Any:
        """The devices that were asked for; None where torchrun's or SLURM's variables said it: they are gone."""
        trainer = self.config.trainer
        return None if OmegaConf.is_interpolation(trainer, "devices") else trainer.devices


def read_jobs(folder: Path) -> list[Job]:
    """Read the jobs of a sweep from their folders, in the order in which they ran.

    Raises:
        FileNotFoundError: there is none.
    """
    names = [path.parents[1].relative_to(folder).as_posix() for path in folder.rglob(".hydra/config.yaml")]
    if not names:
        raise FileNotFoundError(f"no jobs in {folder}; give the folder of a sweep, as multirun/DATE/TIME")
    return [_read_job(name, folder / name) for name in sorted(names, key=lambda name: (len(name), name))]  # 10 after 9


def _read_job(name: str, folder: Path) -> Job:
    config = OmegaConf.load(folder / ".hydra" / "config.yaml")
    overrides = OmegaConf.to_container(OmegaConf.load(folder / ".hydra" / "overrides.yaml"), resolve=False)
    assert isinstance(config, DictConfig)
    assert isinstance(overrides, list)
    failure, summary = read_failure(folder), None
    if failure is None and (folder / FILE_NAME).exists():
        summary = read_summary(folder / FILE_NAME)
    elif failure is None:
        failure = "it did not end"
    return Job(name, config, tuple(map(str, overrides)), summary, failure)
