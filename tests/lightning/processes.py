"""Start the ranks of a test as real processes, with a hard time limit and nothing left behind."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from typing import Any

import torch

from tests.lightning.fitting import Case
from tests.processes import free_port, start_module

ROOT = Path(__file__).parents[2]


def run_ranks(
    module: str, arguments: list[str], num_ranks: int, directory: Path, seconds: float, num_nodes: int = 1
) -> tuple[list[int | None], list[str]]:
    """Run `python -m module *arguments rank` once for each rank, on nodes that are all this machine.

    Returns:
        Exit codes (None: did not end within the limit and was killed) and outputs.
    """
    port = free_port()
    base = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    processes, files = [], [directory / f"rank{rank}.log" for rank in range(num_ranks)]
    for rank in range(num_ranks):
        node, local_rank = divmod(rank, num_ranks // num_nodes)
        ranked = {"LOCAL_RANK": str(local_rank), "NODE_RANK": str(node), "WORLD_SIZE": str(num_ranks)}
        environment = {**base, **ranked, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if num_ranks > 1 else base
        processes.append(start_module(module, [*arguments, str(rank)], environment, files[rank]))
    deadline = time.monotonic() + seconds
    try:
        for p in processes:
            p.join(max(0.0, deadline - time.monotonic()))
        codes = [p.exitcode for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.join()
    return codes, [file.read_text() for file in files]


def run_cases(
    cases: list[Case], num_ranks: int, directory: Path, seconds: float = 240.0, num_nodes: int = 1
) -> dict[str, list[dict[str, Any]]]:
    """Fit cases on real processes; for each the results of all ranks."""
    directory.mkdir(exist_ok=True)
    (directory / "cases.pkl").write_bytes(pickle.dumps(cases))
    codes, outputs = run_ranks("tests.lightning.worker", [str(directory)], num_ranks, directory, seconds, num_nodes)
    assert codes == [0] * num_ranks, "\n".join(
        f"--- rank {r}: exit {c}\n{o[-3000:]}" for r, (c, o) in enumerate(zip(codes, outputs, strict=True))
    )
    return {c.name: [torch.load(directory / f"{c.name}.{r}.pt", weights_only=False) for r in range(num_ranks)] for c in cases}
