"""Jobs in processes of their own: what they leave when they end, fail, are killed or are not waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.multiprocessing import ProcessRaisedException

from recipes.jobs import FAILURE_FILE_NAME, failure_noted, read_failure
from tests.recipes.leftovers import all_end, processes_naming

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, signal, subprocess, sys, time
from pathlib import Path
import hydra
from hydra.core.hydra_config import HydraConfig
from recipes.jobs import failure_noted, read_failure, run_job

def do(deed, folder):
    if deed == "raise":
        raise ValueError("no such thing, really")
    if deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "leave":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(folder)])
    if deed == "sleep":
        time.sleep(60)

@hydra.main(version_base="1.3", config_path=".", config_name="app")
def main(config):
    folder = Path(HydraConfig.get().runtime.output_dir)
    if config.deed is not None:
        with failure_noted(folder):
            do(config.deed, folder)
        return
    for deed in config.deeds:
        ended_well = run_job([f"deed={deed}"], folder / deed, os.environ)
        print(deed, ended_well, read_failure(folder / deed), flush=True)

main()
"""


def start(folder: Path, *deeds: str) -> subprocess.Popen[str]:
    (folder / "app.py").write_text(SCRIPT)
    (folder / "app.yaml").write_text(f"deed: null\ndeeds: {list(deeds)}\n")
    return subprocess.Popen(
        ["timeout", "-k", "1", "60", sys.executable, folder / "app.py", f"hydra.run.dir={folder}/jobs"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_first_process_that_fails_says_why(tmp_path):
    for text in ("disk full\nmore", "connection closed"):
        with pytest.raises(OSError, match=text.splitlines()[0]), failure_noted(tmp_path):
            raise OSError(text)
    assert read_failure(tmp_path) == "OSError: disk full"


def test_a_spawned_process_is_quoted_without_its_traceback(tmp_path):
    text = (
        "\n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n  ...\nOSError: disk full\n"
    )
    with pytest.raises(ProcessRaisedException), failure_noted(tmp_path):
        raise ProcessRaisedException(text, 1, 1234)
    assert read_failure(tmp_path) == "OSError: disk full"


def test_nothing_is_noted_without_a_failure(tmp_path):
    with failure_noted(tmp_path):
        pass
    assert read_failure(tmp_path) is None
    assert not (tmp_path / FAILURE_FILE_NAME).exists()


@pytest.mark.distributed
def test_every_end_of_a_job_is_told_and_nothing_is_left(tmp_path):
    (tmp_path / "jobs" / "leave").mkdir(parents=True)
    (tmp_path / "jobs" / "leave" / FAILURE_FILE_NAME).write_text("of an earlier run")
    process = start(tmp_path, "raise", "kill", "leave")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "raise False ValueError: no such thing, really\n" in output
    assert "kill False its first process was ended by SIGKILL\n" in output
    assert "leave True None\n" in output
    assert all_end(str(tmp_path))


@pytest.mark.distributed
def test_a_job_ends_with_the_process_that_started_it(tmp_path):
    process = start(tmp_path, "sleep")
    deadline = time.monotonic() + 50
    while not processes_naming("deed=sleep") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_naming("deed=sleep")
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert all_end(str(tmp_path))
