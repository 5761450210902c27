"""The co-optimizer's benchmark: rows are measured once, baselines have the paper's partitions, the report adds them up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_zb.planning.planner import make_plan
from recipes.benchmarks import cooptimizer, cooptimizer_pictures, cooptimizer_report
from recipes.costs.models import CONFIGURATIONS


def test_baselines_cut_between_whole_layers_and_charge_links():
    config = CONFIGURATIONS["deepseek-small"]
    costs = config.costs(2048)
    plans = cooptimizer.baseline_plans(config, costs, 4, 8)
    assert [len(chunk) for chunk in plans["s-1f1b"].partition.chunks] == [9, 8, 8, 9]  # two items a layer, and the ends
    assert len(plans["i-1f1b"].partition.chunks) == 8
    whole = [len(chunk) for chunk in plans["mist-layers"].partition.chunks]
    assert [n % 2 for n in whole] == [1, 0, 0, 1]  # the head keeps a layer
    busiest = {name: max(plans[name].predicted.busy) for name in ("mist", "mist-layers", "s-1f1b")}
    assert busiest["mist"] <= busiest["mist-layers"] < 0.9 * busiest["s-1f1b"]
    assert all(cooptimizer.peak_bytes(plan) <= 80e9 for plan in plans.values())
    assert all(plan.predicted.step_time > 1.001 * cooptimizer.floor(costs, 4, 8) for plan in plans.values())
    free = make_plan(type(costs)(costs.layers), 4, 8, "1f1b", partition=config.even_counts(4))
    assert plans["s-1f1b"].predicted.step_time > free.predicted.step_time
    assert cooptimizer.baseline_plans(config, costs, 16, 8)["i-1f1b"] is None  # 32 chunks of 16 layers


def test_a_part_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    results = tmp_path / "results.jsonl"
    arguments = ["ablation", "--results", str(results), "--effort", "1", "--only", "nemotron-h-small"]
    cooptimizer.main([*arguments[:-1], "nemotron-h-small none"])
    first = results.read_text()
    cooptimizer.main([*arguments, "--seconds", "0"])
    assert results.read_text() == first
    assert "more rows are left" in capsys.readouterr().out
    cooptimizer.main([*arguments[:-1], "nemotron-h-small partition"])
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert results.read_text().startswith(first)
    assert [row["phases"] for row in rows[:2]] == [[], ["partition"]]
    assert rows[1]["ours"] < rows[0]["ours"]


def row(config: str, p: int, m: int, ours: float) -> cooptimizer.Row:
    times = {"s-1f1b": 4.0, "i-1f1b": None, "zb": 3.5, "mist": 3.0, "mist-layers": 3.2, "hanayo": 4.5}
    return {
        "part": "grid", "name": f"{config} {p} {m}", "config": config, "tokens": 4096, "P": p, "m": m, "floor": 2.0,
        "baselines": times, "baseline_peaks": {b: t and 40e9 for b, t in times.items()}, "ours": ours, "seconds": 1.5 + m,
        "bound": 2.0, "peak": 50e9, "chunks": [1, 2], "layers": [3, 4, 5], "placement": [0, 1, 0], "status": "feasible",
    }  # fmt: skip


def test_the_report_averages_speed_ups(tmp_path: Path):
    rows = [row("gemma-small", 4, 16, 2.0), row("gemma-large", 16, 64, 2.5)]
    text = cooptimizer_report.report(rows)
    cells = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in text.splitlines() if " | " in line}
    assert cells["all"][2:] == [
        "1.800 (2.000)",
        "-",
        "1.575 (1.750)",
        "1.350 (1.500)",
        "1.440 (1.600)",
        "2.025 (2.250)",
        "1.2000",
    ]
    assert cells["devices that grow with the size"][1] == "2"
    assert cells["16 devices"][5] == "1.200 (1.500)"
    assert "Slowest generation: 65.5 s" in text
    cooptimizer_pictures.draw_all(rows, tmp_path)
    assert (tmp_path / "grid.png").stat().st_size > 10_000
