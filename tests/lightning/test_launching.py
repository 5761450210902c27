"""What a run leaves behind in the process that started it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import timedelta

import pytest

from lightning_zb import ZeroBubbleStrategy
from lightning_zb.launching import _find_killed, _is_orphan
from tests.lightning.fitting import Case, run
from tests.lightning.processes import ROOT
from tests.recipes.leftovers import all_end

CONFIG = """
devices: 2
strategy:
  _target_: lightning_zb.ZeroBubbleStrategy
  memory_budget: null
"""
HYDRA_SCRIPT = """
import logging, os, warnings
import hydra
import lightning as L
from hydra.core.hydra_config import HydraConfig
from torch.utils.data import DataLoader
from tests.lightning.models import SequentialModule, Vectors

@hydra.main(version_base="1.3", config_path=".", config_name="app")
def main(config):
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(5, verbose=False)
    strategy = hydra.utils.instantiate(config.strategy)
    trainer = L.Trainer(
        accelerator="cpu", devices=config.devices, strategy=strategy, max_steps=2, accumulate_grad_batches=4, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(SequentialModule(), DataLoader(Vectors(16), batch_size=2))
    folder = HydraConfig.get().runtime.output_dir
    port = os.environ.get("MASTER_PORT")
    print(f"RESULT {folder} {trainer.global_rank} {trainer.world_size} {port} {trainer.global_step}", flush=True)

main()
"""


def test_one_process_leaves_the_environment_alone(tmp_path):
    """Else a script started from here would take itself for a rank and wait for the others."""
    before = dict(os.environ)
    run(Case("run", "sequential", strategy={"virtual_devices": 2}, size=8), tmp_path)
    changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
    assert not changed & {"LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@pytest.mark.parametrize(
    ("deed", "found"),
    [("sys.exit(1)", None), ("os.kill(os.getpid(), signal.SIGKILL)", (2, "SIGKILL"))],
    ids=["failed", "killed"],
)
def test_a_killed_child_is_told_from_one_that_failed(deed, found):
    """A child that failed has its own traceback; one that was killed has nobody else to name it."""
    scripts = ["import sys; sys.stdin.read()", f"import os, signal, sys; {deed}"]
    children = [subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) for script in scripts]
    children[1].wait()
    assert _find_killed(children) == found
    children[0].communicate()


def test_a_process_knows_whether_the_one_that_started_it_has_ended(monkeypatch):
    assert not _is_orphan()  # nobody's launcher started it
    monkeypatch.setenv("LIGHTNING_ZB_STARTED_BY", str(os.getppid()))
    assert not _is_orphan()
    monkeypatch.setenv("LIGHTNING_ZB_STARTED_BY", str(os.getpid()))
    assert _is_orphan()


def test_timeout_in_seconds_or_as_lightning_has_it():
    of_seconds, of_delta = ZeroBubbleStrategy(timeout=90), ZeroBubbleStrategy(timeout=timedelta(minutes=1.5))
    assert of_seconds._options.timeout == of_delta._options.timeout == timedelta(seconds=90)


@pytest.mark.slow
@pytest.mark.distributed
def test_stock_hydra_sweep_of_a_users_script(tmp_path):
    """Each job has its own folder, port and processes, whatever the number of devices before it; no process is left."""
    (tmp_path / "app.py").write_text(HYDRA_SCRIPT)
    (tmp_path / "app.yaml").write_text(CONFIG)
    sweep = ["-m", "devices=2,1", "strategy.memory_budget=1.0,1.5", f"hydra.sweep.dir={tmp_path}/jobs"]
    result = subprocess.run(
        ["timeout", "-k", "1", "300", sys.executable, tmp_path / "app.py", *sweep],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    results = re.findall(r"RESULT (\S+) (\d) (\d) (\w+) (\d)", result.stdout)  # processes may share a line
    expected = [(f"{tmp_path}/jobs/{job}", rank, size) for job, size in enumerate("2211") for rank in "01"[: int(size)]]
    assert sorted((folder, rank, size) for folder, rank, size, *_ in results) == expected
    assert {steps for *_, steps in results} == {"2"}
    ports = {folder: port for folder, _, size, port, _ in results if size == "2"}
    assert len(set(ports.values())) == 2
    assert {port for _, _, size, port, _ in results if size == "1"} == {"None"}
    assert all_end(str(tmp_path))
