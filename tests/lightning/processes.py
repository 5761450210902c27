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


def run_ranks(
    command: list[str], num_ranks: int, directory: Path, seconds: float, num_nodes: int = 1
) -> tuple[list[int | None], list[str]]:
    """Run a command once for each rank, on nodes that are all this machine.

    Returns:
        Exit codes (None: did not end within the limit and was killed) and outputs.
    """
    port = free_port()
    base = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    processes, files = [], []
    for rank in range(num_ranks):
        node, local_rank = divmod(rank, num_ranks // num_nodes)
        ranked = {"LOCAL_RANK": str(local_rank), "NODE_RANK": str(node), "WORLD_SIZE": str(num_ranks)}
        environment = {**base, **ranked, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if num_ranks > 1 else base
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


def run_cases(
    cases: list[Case], num_ranks: int, directory: Path, seconds: float = 240.0, num_nodes: int = 1
) -> dict[str, list[dict[str, Any]]]:
    """Fit cases on real processes; for each the results of all ranks."""
    directory.mkdir(exist_ok=True)
    (directory / "cases.pkl").write_bytes(pickle.dumps(cases))
    command = [sys.executable, "-m", "tests.lightning.worker", str(directory)]
    codes, outputs = run_ranks(command, num_ranks, directory, seconds, num_nodes)
    assert codes == [0] * num_ranks, "\n".join(
        f"--- rank {r}: exit {c}\n{o[-3000:]}" for r, (c, o) in enumerate(zip(codes, outputs, strict=True))
    )
    return {c.name: [torch.load(directory / f"{c.name}.{r}.pt", weights_only=False) for r in range(num_ranks)] for c in cases}
