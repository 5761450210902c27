"""The planner's benchmark: cells are kept and gone on from, the report and the picture come out."""

from __future__ import annotations

import pytest

from recipes.benchmarks import planner
from recipes.benchmarks.published import CHUNK_ROWS, STAGE_ROWS
from tests.planning.paper import ROWS, ZB_V_ROWS


def test_the_rows_are_those_of_the_tests():
    """Two copies of the published tables, made apart."""
    for ours, row in zip(STAGE_ROWS, ROWS, strict=True):
        assert (ours.forward, ours.backward_input, ours.backward_weight) == row.times
        assert (ours.stages, ours.microbatches, ours.communication) == (row.num_devices, row.num_microbatches, row.comm)
        assert ours.weight_stash / ours.activation == pytest.approx(row.stash_ratio)
        for name, _, rate in ours.public[:5]:
            assert rate == pytest.approx(row.bubbles[name], abs=6e-5)
    for ours, row in zip(CHUNK_ROWS, ZB_V_ROWS, strict=True):
        assert (ours.stages, ours.microbatches) == row[:2]
        assert 500 * ours.forward == pytest.approx(row[2])
        assert ours.public[0][2] == row[-1]


def test_the_best_public_one_within_a_budget():
    assert STAGE_ROWS[0].best_public(0.4) is None
    assert STAGE_ROWS[0].best_public(0.75) == ("v-half", 0.1702)
    assert STAGE_ROWS[0].best_public(2.0) == ("zb-v", 0.0076)


def test_cells_are_kept_and_gone_on_from(tmp_path, capsys, monkeypatch):
    results, report, picture = tmp_path / "cells.jsonl", tmp_path / "report.md", tmp_path / "curve.png"
    arguments = ["--rows", "3", "--budgets", "2.0", "--effort", "0", "--results", str(results)]
    planner.main(arguments)
    assert "| 6.2B | 8 | 24 | 2 | 0.0000 | 0.0029 zb-2p |" in capsys.readouterr().out
    monkeypatch.setattr(planner, "solve", lambda *asked: pytest.fail(f"{asked} is known"))
    planner.main([*arguments, "--out", str(report), "--picture", str(picture)])
    assert report.read_text().count("| 6.2B |") == 1
    assert picture.stat().st_size > 10_000
    report.write_text("# Mine\n" + report.read_text().replace("0.0000", "0.5000") + "\n## Not reached\n")
    planner.main([*arguments, "--out", str(report), "--known"])  # only the table is written anew
    assert report.read_text().startswith("# Mine\n")
    assert report.read_text().endswith("\n## Not reached\n")
    assert "0.5000" not in report.read_text()
    planner.main([*arguments, "--budgets", "1.0", "--seconds", "-1"])  # begins nothing more
