"""Whatever fails on whichever rank: all processes end soon, with the first cause in sight and earlier checkpoints whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.lightning.processes import ROOT

pytestmark = pytest.mark.distributed

SECONDS = 150
"""Far more than any of them needs; a hang would take longer than that."""

_HOOKS = ["configure_optimizers", "on_train_start", "on_train_batch_start", "training_step", "on_after_backward"]
_HOOKS += ["on_before_optimizer_step", "on_train_batch_end", "validation_step", "on_save_checkpoint", "on_train_epoch_end"]
_CALLBACK_HOOKS = ["setup", "on_train_batch_start", "on_before_zero_grad", "on_train_batch_end", "on_validation_end"]
_RAISED = [*_HOOKS, *(f"callback.{hook}" for hook in _CALLBACK_HOOKS), "optimizer", "collate", "memory"]
_EARLY = {"configure_optimizers", "on_train_start", "callback.setup", "optimizer", "collate", "loader"}
_SENTENCES = {
    "shape": "hand over tensors of shapes that follow from the batch",
    "loader": "gives rank 1 18 batches an epoch, but rank 0 32",
    "SIGKILL": "ended",
    "SIGTERM": "received SIGTERM",
    "SIGSTOP": "has ended or does not answer",
}
_QUICK = [("training_step", 1)]


def _cases():
    raised = [(what, rank) for what in _RAISED for rank in (0, 1)]
    raised.remove(("on_train_epoch_end", 1))  # passed over with a warning: that rank lacks what the loss rank logged
    outside = [("SIGKILL", 0), ("SIGKILL", 1), ("SIGTERM", 0), ("SIGTERM", 1), ("SIGSTOP", 1), ("SIGINT", 0)]
    for case in [*raised, *outside, ("shape", 0), ("loader", 1)]:
        yield pytest.param(*case, marks=() if case in _QUICK else pytest.mark.slow)


@pytest.mark.parametrize(("what", "rank"), _cases())
def test_all_processes_end_with_the_first_cause(what: str, rank: int, tmp_path: Path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.lightning.failing_script", what, str(rank), str(tmp_path / "checkpoints")]
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(SECONDS)
        finally:
            left = _end_group(process.pid)
    text = log.read_text()
    assert code != 0, text[-3000:]
    assert not left, f"processes of {what} on rank {rank} outlive it: {text[-3000:]}"
    last = text.strip().splitlines()[-1]
    assert _last_words(what, rank) in last, text[-3000:]
    assert _SENTENCES.get(what, "") in text, text[-3000:]
    for path in (tmp_path / "checkpoints").glob("step*.ckpt"):
        assert torch.load(path, weights_only=True)["state_dict"]
    assert what in _EARLY or any((tmp_path / "checkpoints").glob("step*.ckpt")), "it failed before it was meant to"


def _last_words(what: str, rank: int) -> str:
    """What stands in the last line on the screen."""
    if what in _RAISED:
        return f"deliberate failure in {what} on rank {rank}"
    if what in ("SIGKILL", "SIGTERM") and rank == 1:
        return f"rank 1 was ended by {what}"
    if what == "SIGTERM":
        return "was ended by SIGTERM"  # rank 0 hands it on, so any of them may end first
    if what == "SIGKILL":
        return "rank 0 ended without a word, as SIGKILL ends one"
    if what == "SIGINT":
        return "rank 0 was interrupted"
    return _SENTENCES.get(what, "") if what in ("shape", "SIGSTOP") else ""


def _end_group(group: int, grace_seconds: float = 12.0) -> bool:
    """Whether processes of the group are left after a while; they are ended."""
    deadline = time.monotonic() + grace_seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.1)
    os.killpg(group, signal.SIGKILL)
    return True
