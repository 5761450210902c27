"""`compare` over two costs files reproduces what the first paper measured about microbatch sizes, Tables 6 and 7 (arXiv)."""

from __future__ import annotations

import re
from itertools import permutations

import pytest

from lightning_zb.cli import main
from lightning_zb.planning.planfile import write_costs
from tests.planning.paper import EQUAL_MEMORY, TWICE_THE_SIZE, size_costs

SMALLEST = (16, 48), (16, 64)


@pytest.fixture
def step_times(tmp_path, capsys):
    """Step times in seconds by (schedule, costs file), as `compare` prints them, with the lines below its table."""

    def run(num_devices, m, m_half, schedules, *more):
        files = []
        for name, half, microbatches in (("whole", False, m), ("half", True, m_half)):
            write_costs(size_costs(num_devices, m, half), tmp_path / f"{name}.json")
            files.append(f"{tmp_path / name}.json:{microbatches}")
        arguments = ["--devices", str(num_devices), "--schedules", ",".join(schedules)]
        assert main(["compare", "--costs", *files, *arguments, *more]) == 0
        header, *lines = capsys.readouterr().out.splitlines()
        assert "step_time (ms)" in header or "step_time (s)" in header
        rows = [re.split(r"\s{2,}", line) for line in lines if not re.search("infeasible|budget", line)]
        scale = 1e-3 if "(ms)" in header else 1.0
        found = {(row[0], row[1].split(":")[0]): scale * float(row[2]) for row in rows}
        assert list(found.values()) == sorted(found.values())  # the fastest first
        return found, lines[len(rows) :]

    return run


@pytest.mark.parametrize("size", [pytest.param(s, marks=[pytest.mark.slow] * (s != SMALLEST[0])) for s in EQUAL_MEMORY])
def test_equal_memory_and_global_batch(size, step_times):
    """Table 6: who wins, and by how much.

    Speeds relative to zb-v are up to 3 % below the measured ones, and 5.3 % for 1f1b: what the authors' runs of zb-v lose
    against the simulation, whose bubble rates these plans have (Table 8).
    """
    num_devices, m = size
    paper = EQUAL_MEMORY[size]
    found, notes = step_times(num_devices, m, 2 * m, ["1f1b", "zb-1p", "zb-2p", "zb-v"], "--memory-budget", "1.0")
    assert [line.split(":")[0] for line in notes] == ["zb-2p (whole"]  # twice the memory of the others at the same size
    speeds = {name: 1 / found[name, "half" if name == "zb-2p" else "whole"] for name in paper}
    for name, samples in paper.items():
        assert speeds[name] / speeds["zb-v"] == pytest.approx(samples / paper["zb-v"], rel=0.055 if name == "1f1b" else 0.03), (
            name
        )
    for a, b in permutations(paper, 2):
        if paper[a] > 1.025 * paper[b]:
            assert speeds[a] > speeds[b], (a, b)


@pytest.mark.parametrize("size", [pytest.param(s, marks=[pytest.mark.slow] * (s != SMALLEST[1])) for s in TWICE_THE_SIZE])
def test_twice_the_microbatch_size(size, step_times):
    """Table 7: kernels gain from larger microbatches, less where they were large already (6.2B)."""
    num_devices, m = size
    found, _ = step_times(num_devices, m, m, list(TWICE_THE_SIZE[size]))
    for name, gain in TWICE_THE_SIZE[size].items():
        assert 2 * found[name, "half"] / found[name, "whole"] - 1 == pytest.approx(gain, abs=0.025), name
