"""Replicas of a pipeline: every bit of Lightning's own data parallelism, whatever runs within a replica."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zb.replicas import Replicas
from tests.lightning.fitting import Case, differences, run
from tests.lightning.processes import run_cases

_COMMON: dict[str, Any] = {"size": 36, "batch_size": 2, "accumulate": 2, "validate": True}


def _case(name: str, data_parallel_size: int, schedule: str, devices: int, clip: float | None, **options: Any) -> Case:
    strategy = {"schedule": schedule, "data_parallel_size": data_parallel_size}
    return Case(name, "tokens", options, {"gradient_clip_val": clip}, strategy=strategy, devices=devices, **_COMMON)


def _reference(case: Case) -> Case:
    return replace(case, strategy=None, plain_strategy="ddp", devices=2)


def test_neighbours_of_a_pipeline_have_neighbouring_ranks():
    places = [Replicas.of(6, 2, rank) for rank in range(6)]
    assert [p.replica for p in places] == [0, 0, 0, 1, 1, 1]
    assert [p.local_rank for p in places] == [0, 1, 2, 0, 1, 2]
    assert places[4].members == (3, 4, 5)
    assert places[0].pipelines((2, 0, 1)) == [(2, 0, 1), (5, 3, 4)]
    with pytest.raises(ValueError, match="data_parallel_size=4 does not divide the 6 processes"):
        Replicas.of(6, 4, 0)


@pytest.mark.distributed
def test_replicas_equal_lightnings_data_parallelism_and_broadcast_data_the_plain_trainer(tmp_path: Path):
    (tmp_path / "ddp").mkdir()
    wide = [
        _case("zb-v", 2, "zb-v", 4, clip=0.5, groups=True),
        _case("1f1b-tied", 2, "1f1b", 4, clip=None, tied=True),
    ]
    alone = _case("alone", 2, "1f1b", 2, clip=0.5)
    split = {"split_by_rank": True, "shuffle": False, "strategy": {"schedule": "zb-v", "data": "broadcast"}}
    broadcast = replace(_case("broadcast", 1, "zb-v", 2, clip=None), **split)
    results = run_cases(wide, 4, tmp_path)
    expected = run_cases([_reference(c) for c in (*wide, alone)], 2, tmp_path / "ddp")
    results |= run_cases([alone, broadcast], 2, tmp_path)
    assert differences(results["broadcast"], run(broadcast.plain(), tmp_path / "plain")) == []
    for case in (*wide, alone):
        parts, half = results[case.name], len(results[case.name]) // 2
        reference = expected[case.name][0]
        assert differences(parts[:half], reference) == [], case.name
        for mine, theirs in zip(parts[:half], parts[half:], strict=True):
            assert all(torch.equal(w, theirs["weights"][n]) for n, w in mine["weights"].items()), case.name
