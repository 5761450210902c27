"""Every configuration file composes, and everything it names can be built."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException, InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig

from recipes.models.checkpoint import SavePretrained
from tests.recipes.checkpoint_folder import make_checkpoint

CONF = Path(__file__).parents[1] / "conf"
FILES = sorted(path.relative_to(CONF).with_suffix("").as_posix() for path in CONF.glob("*/*.yaml"))
STARTED_BY = {
    "cluster/torchrun": {"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"},
    "cluster/slurm": {"SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_NTASKS": "2"},
}
NEEDS_GPU = {"cluster/one-node-gpu", "cluster/slurm"}


def composed(tmp_path: Path, *overrides: str, name: str = "train") -> DictConfig:
    # Hydra knows an output folder only while it runs a job.
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(name, [f"output_dir={tmp_path}", *overrides])


def needed_by(file: str, texts: Path, checkpoint: Path) -> list[str]:
    """The overrides without which a file is not complete, and a skipped test where it needs a plugin that is absent."""
    if file == "search/optuna":
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="extra optuna")
    return {
        "data/folder": [f"data.read.path={texts}"],
        "data/tokens": [f"data.read.path={texts}", f"checkpoint={checkpoint}"],
        "model/checkpoint": [f"checkpoint={checkpoint}"],
    }.get(file, [])


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.txt").write_text(name * 400)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "some text that a tokenizer learns from")


@pytest.mark.parametrize("file", FILES)
def test_every_file_composes_and_instantiates(file, tmp_path, texts, checkpoint, monkeypatch):
    for name, value in STARTED_BY.get(file, {}).items():
        monkeypatch.setenv(name, value)
    group, name = file.split("/")
    config = composed(tmp_path, f"{group}={name}", *needed_by(file, texts, checkpoint))
    with torch.device("meta"):  # names and shapes, without the memory of large vocabularies
        instantiate(config.model)
    instantiate(config.data)
    if file in NEEDS_GPU and not torch.cuda.is_available():
        with pytest.raises(InstantiationException, match="gpu backend"):
            instantiate(config.trainer)
    else:
        instantiate(config.trainer)


def test_finetune_composes_and_instantiates(tmp_path, texts, checkpoint):
    config = composed(tmp_path, f"checkpoint={checkpoint}", f"data.read.path={texts}", name="finetune")
    instantiate(config.model)
    instantiate(config.data)
    saving = [c for c in instantiate(config.trainer).callbacks if isinstance(c, SavePretrained)]
    assert [(c.folder, c.tokenizer) for c in saving] == [(f"{tmp_path}/finetuned", str(checkpoint))]


@pytest.mark.parametrize("key", ["trainer.max_step", "data.batchsize", "model.lr", "strategy.memory"])
def test_a_misspelt_key_is_named(key, tmp_path):
    with pytest.raises(ConfigCompositionException, match=key.replace(".", r"\.")):
        composed(tmp_path, f"{key}=1")


def test_trainer_receives_every_callback(tmp_path):
    config = composed(tmp_path, "callbacks=early-stopping", "strategy=plain")
    received = {type(callback) for callback in instantiate(config.trainer).callbacks}
    assert received >= {type(instantiate(callback)) for callback in config.callbacks.values()}


def test_plain_strategy_is_one_process_without_comparison(tmp_path):
    config = composed(tmp_path, "strategy=plain")
    assert (config.strategy, config.trainer.devices, config.compare) == ("auto", 1, None)
