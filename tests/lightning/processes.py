"""Start the ranks of a test as real processes, with a hard time limit and nothing left behind."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.lightning.fitting import Case

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_ranks(command: list[str], num_ranks: int, directory: Path, seconds: float) -> tuple[list[int | None], list[str]]:
    """Run a command once for each rank.

    Returns:
        Exit codes (None: did not end within the limit and was killed) and outputs.
    """
    port = free_port()
    base = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    processes, files = [], []
    for rank in range(num_ranks):
        ranked = {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"}
        environment = {**base, **ranked, "MASTER_PORT": str(port)} if num_ranks > 1 else base
        files.append(open(directory / f"rank{rank}.log", "w+"))  # noqa: SIM115
        processes.append(
            subprocess.Popen([*command, str(rank)], env=environment, cwd=ROOT, stdout=files[-1], stderr=subprocess.STDOUT)
        )
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline and any(p.poll() is None for p in processes):
            time.sleep(0.1)
        codes = [p.poll() for p in processes]
    finally:
        for p in processes:
            if p.poll() is None:
                p.kill()
                p.wait()
    outputs = []
    for file in files:
        file.seek(0)
        outputs.append(file.read())
        file.close()
    return codes, outputs


def run_cases(cases: list[Case], num_ranks: int, directory: Path, seconds: float = 240.0) -> dict[str, list[dict[str, Any]]]:
    """Fit cases on real processes; for each the results of all ranks."""
    (directory / "cases.pkl").write_bytes(pickle.dumps(cases))
    codes, outputs = run_ranks([sys.executable, "-m", "tests.lightning.worker", str(directory)], num_ranks, directory, seconds)
    assert codes == [0] * num_ranks, "\n".join(
        f"--- rank {r}: exit {c}\n{o[-3000:]}" for r, (c, o) in enumerate(zip(codes, outputs, strict=True))
    )
    return {c.name: [torch.load(directory / f"{c.name}.{r}.pt", weights_only=False) for r in range(num_ranks)] for c in cases}
