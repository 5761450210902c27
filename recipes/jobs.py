"""Jobs that run in processes of their own: the comparison of a run, and each job of a sweep.

A job leaves summary.json in its folder when it ends well, and one sentence in failure.txt when it does not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

FAILURE_FILE_NAME = "failure.txt"


@contextmanager
def failure_noted(folder: Path) -> Iterator[None]:
    """Note why a job fails, and let the exception go on.

    The first process that fails writes; the others fail because of it.

    Args:
        folder: of the job.
    """
    try:
        yield
    except Exception as error:
        _note(folder, _describe(error))
        raise


def read_failure(folder: Path) -> str | None:
    """The first line of why a job failed; None where nothing is noted."""
    path = folder / FAILURE_FILE_NAME
    return path.read_text().strip().splitlines()[0] if path.exists() else None


def run_job(overrides: list[str], folder: Path, environment: Mapping[str, str]) -> bool:
    """Run this script once more with the given overrides, and end all its processes with it.

    Args:
        overrides: of the configuration, this run's own.
        folder: of the job.
        environment: of its processes.

    Returns:
        Whether the job ended well; if not, failure.txt says why.
    """
    (folder / FAILURE_FILE_NAME).unlink(missing_ok=True)  # of a job that ran in this folder before
    command = [
        sys.executable,
        os.path.abspath(sys.argv[0]),
        f"--config-name={HydraConfig.get().job.config_name}",
        *overrides,
        f'hydra.run.dir="{folder}"',
        "hydra.output_subdir=null",  # the folder has the configuration already
    ]
    exit_code = _run(command, environment)
    if exit_code < 0:  # what the others noted is only what followed
        (folder / FAILURE_FILE_NAME).unlink(missing_ok=True)
        _note(folder, f"its first process was ended by {signal.Signals(-exit_code).name}")
    elif exit_code > 0:
        _note(folder, f"its first process ended with exit code {exit_code}")
    return exit_code == 0


def _describe(error: Exception) -> str:
    name, text = type(error).__name__, str(error).strip()
    if name == "ProcessRaisedException":  # torch's, of a spawned process: the text of a whole traceback
        return text.splitlines()[-1]
    return f"{name}: {text}" if text else name


def _note(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError), open(folder / FAILURE_FILE_NAME, "x") as file:
        file.write(text + "\n")


def _run(command: list[str], environment: Mapping[str, str]) -> int:
    """Run a command in a session of its own, so that whatever it started can be ended with it."""
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return process.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        signal.signal(signal.SIGTERM, before)
