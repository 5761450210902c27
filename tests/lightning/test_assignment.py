"""Which process runs which chunks: each chunk once, and the loss on rank 0."""

from __future__ import annotations

import pytest

from lightning_zb.assignment import Assignment
from lightning_zb.planning.planner import make_plan
from tests.lightning.known_costs import EQUAL

NUM_LAYERS = len(EQUAL.layers) - 2


@pytest.mark.parametrize(
    ("schedule", "placement"), [("1f1b", None), ("zb-v", None), ("interleaved", None), ("zb", [1, 0, 1, 1])]
)
def test_every_process_knows_alike_who_runs_what(schedule, placement):
    plan = make_plan(EQUAL, 2, 4, schedule, partition="even", placement=placement)
    processes = [Assignment.of(plan, NUM_LAYERS, rank) for rank in range(2)]
    everything = Assignment.of(plan, NUM_LAYERS, None)
    assert sorted(c for process in processes for chunks in process.chunks for c in chunks) == list(
        range(len(plan.partition.chunks))
    )
    assert [process.own_windows for process in processes] == everything.windows_by_rank == processes[0].windows_by_rank
    assert processes[0].own_windows[-1].is_last
    assert sorted(everything.own_windows, key=everything.windows.index) == list(everything.windows)
    for rank, process in enumerate(processes):
        assert process.ranks[process.devices[0]] == rank
