"""Every way in which processes start: the plain Trainer's bits, twice in one process, in fit and in test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lightning_zb.launching import _child_command
from tests.lightning import launched_script
from tests.lightning.processes import ROOT, free_port

pytestmark = pytest.mark.distributed

SECONDS = 240
_SCRIPT = ["-m", "tests.lightning.launched_script"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> list[dict]:
    directory = tmp_path_factory.mktemp("plain")
    launched_script.main(directory, "plain", 1, 1)
    return [torch.load(directory / f"run{run}.rank0.pt", weights_only=True) for run in range(2)]


def _run(commands: list[tuple[list[str], dict[str, str]]], directory: Path, text: str | None = None) -> str:
    """Start commands side by side, each with variables of its own; all must end well in time.

    Returns:
        What they wrote.
    """
    hidden = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    base = {k: v for k, v in os.environ.items() if k not in hidden} | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    logs = [directory / f"log{i}" for i in range(len(commands))]
    processes = []
    for log, (command, variables) in zip(logs, commands, strict=True):
        with log.open("w") as file:
            processes.append(
                subprocess.Popen(
                    command, cwd=ROOT, env={**base, **variables}, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT,
                    text=True, start_new_session=True,
                )
            )  # fmt: skip
    if text is not None:
        assert processes[0].stdin is not None
        processes[0].stdin.write(text)
    deadline = time.monotonic() + SECONDS
    try:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        codes = [process.wait(max(deadline - time.monotonic(), 1)) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    output = "\n".join(log.read_text() for log in logs)
    assert codes == [0] * len(commands), output[-5000:]
    return output


def _check(plain: list[dict], directory: Path, num_ranks: int) -> None:
    for run, expected in enumerate(plain):
        for rank in range(num_ranks):
            found = torch.load(directory / f"run{run}.rank{rank}.pt", weights_only=True)
            assert found["weights"].keys() == expected["weights"].keys()
            assert all(torch.equal(w, found["weights"][name]) for name, w in expected["weights"].items()), (run, rank)
            assert found["tested"] == expected["tested"], (run, rank)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_started_functions(method, plain, tmp_path):
    _run([([sys.executable, *_SCRIPT, str(tmp_path), method, "2", "1"], {})], tmp_path)
    _check(plain, tmp_path, 1)


@pytest.mark.slow
def test_script_run_again(plain, tmp_path):
    _run([([sys.executable, *_SCRIPT, str(tmp_path), "popen", "2", "1"], {})], tmp_path)
    _check(plain, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_torchrun(num_nodes, plain, tmp_path):
    devices = 2 // num_nodes
    rendezvous = ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--nproc-per-node", str(devices)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(num_nodes), *rendezvous]
    arguments = [*_SCRIPT, str(tmp_path), "popen", str(devices), str(num_nodes)]
    _run([([*torchrun, "--node-rank", str(node), *arguments], {}) for node in range(num_nodes)], tmp_path)
    _check(plain, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_slurm(num_nodes, plain, tmp_path):
    """Processes as srun starts them, told by its variables who they are."""
    devices = 2 // num_nodes
    job = {
        "SLURM_JOB_ID": "1234", "SLURM_JOB_NAME": "training", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": str(devices),
        "SLURM_NNODES": str(num_nodes), "SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    command = [sys.executable, *_SCRIPT, str(tmp_path), "popen", str(devices), str(num_nodes)]
    ranks = [
        {**job, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r % devices), "SLURM_NODEID": str(r // devices)} for r in range(2)
    ]
    _run([(command, rank) for rank in ranks], tmp_path)
    _check(plain, tmp_path, 2)


CELLS = """
import lightning as L
import torch
import lightning_zb
from torch.utils.data import DataLoader
from tests.lightning.models import TokenModule, Tokens

class Module(TokenModule):
    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))


def run(number):
    L.seed_everything(5 + number, verbose=False)
    module = Module()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="zero_bubble", max_epochs=1, accumulate_grad_batches=4, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Tokens(32), batch_size=2, shuffle=True))
    tested = trainer.test(module, DataLoader(Tokens(8), batch_size=2), verbose=False)
    torch.save({"weights": module.state_dict(), "tested": tested}, f"DIRECTORY/run{number}.rank0.pt")


run(0)
run(1)
"""


@pytest.mark.slow
def test_interactive_session(plain, tmp_path):
    """As in a notebook: the strategy by its name, a module that stands in no file, two Trainers one after the other."""
    _run([([sys.executable, "-i"], {})], tmp_path, CELLS.replace("DIRECTORY", str(tmp_path)))
    _check(plain, tmp_path, 1)


def test_without_a_script_the_message_says_what_to_do(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["-c"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    with pytest.raises(RuntimeError, match=r"there is no script \('-c'\); save it to a file, or write .*start_method=\"fork\""):
        _child_command(1)
