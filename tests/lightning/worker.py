"""One rank of a parity test: fits the cases it is given, one after another in the same processes, and saves results."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import torch

from tests.lightning.fitting import run

if __name__ == "__main__":
    torch.set_num_threads(1)
    directory, rank = Path(sys.argv[1]), sys.argv[2]
    cases = pickle.loads((directory / "cases.pkl").read_bytes())
    for case in cases:
        torch.save(run(case, directory / f"rank{rank}"), directory / f"{case.name}.{rank}.pt")
