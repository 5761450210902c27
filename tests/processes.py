"""Processes for tests that start in milliseconds: forks of a server which imported torch, Lightning and the package once.

A fresh interpreter needs some seven seconds of CPU for these imports, which is more than most runs of a test need.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import socket
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "lightning_zb", "tests.execution.pipeline_models", "tests.lightning.models"])


def free_port() -> int:
    """A TCP port nobody listens on right now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_module(module: str, arguments: list[str], environment: dict[str, str], output: Path) -> ForkServerProcess:
    """Start what `python -m module *arguments` would run, with all it prints in one file.

    Args:
        module: its dotted name; what it imports besides the preloaded is imported anew.
        arguments: its command line.
        environment: all its variables. Those that libraries read at import (OMP_NUM_THREADS) count as they are in this process.
        output: file for stdout and stderr.

    Returns:
        The process; its `exitcode` is -n where signal n ended it, as that of subprocess.
    """
    process = CONTEXT.Process(target=_run_module, args=(module, arguments, environment, output))
    process.start()
    return process


def _run_module(module: str, arguments: list[str], environment: dict[str, str], output: Path) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    keep_pages_shared()
    _set_lightnings_rank(int(environment.get("LOCAL_RANK", 0)))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def keep_pages_shared() -> None:
    """Spare what the server imported from garbage collection, which would copy every page it looks at: up to a second."""
    gc.freeze()


def _set_lightnings_rank(rank: int) -> None:
    """Lightning reads the rank from the environment when it is imported, here in the server, which has none."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    rank_zero_only.rank = rank  # type: ignore[attr-defined]
