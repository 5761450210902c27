"""Megatron-style layouts and constraints on the command line."""

from __future__ import annotations

import pytest

from lightning_zb.cli import main
from lightning_zb.planning.costs import CostModel, LayerCost, LayerRole
from lightning_zb.planning.planfile import read_plan, write_costs


@pytest.fixture
def arguments(tmp_path):
    ends = [LayerCost(role.value, 1e-3, 1e-3, 1e-3, role=role) for role in (LayerRole.PROLOGUE, LayerRole.EPILOGUE)]
    layers = [LayerCost(f"layers.{i}", 6e-3, 6e-3, 6e-3, 4096.0) for i in range(8)]
    write_costs(CostModel((ends[0], *layers, ends[1])), tmp_path / "costs.json")
    return ["plan", "--costs", str(tmp_path / "costs.json"), "--devices", "4", "--microbatches", "8", "--effort", "1"]


def test_a_layout_goes_in_and_comes_out(arguments, tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main([*arguments, "--layout", "Et|(tt|)*2, t*3 L", "--out", str(path)]) == 0
    assert [len(chunk) for chunk in read_plan(path).partition.chunks] == [2, 2, 2, 4]
    assert main(["export", str(path), "--format", "layout"]) == 0
    assert (tmp_path / "plan.layout.txt").read_text() == "Et|t*2|t*2|t*3L\n"
    capsys.readouterr()
    assert main(["show", str(path)]) == 0
    assert "\nlayout Et|t*2|t*2|t*3L\n" in capsys.readouterr().out


def test_a_plan_without_a_layout_is_not_exported_as_one(arguments, tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main([*arguments, "--schedule", "zb-v", "--partition", "even", "--out", str(path)]) == 0
    assert main(["export", str(path), "--format", "layout"]) == 2
    assert "has no layout" in capsys.readouterr().err
    assert main(["show", str(path)]) == 0
    assert "layout" not in capsys.readouterr().out


def test_auto_keeps_to_constraints(arguments, tmp_path):
    path = tmp_path / "plan.json"
    demands = ["--alone", "epilogue", "--together", "layers.0,layers.2", "--first", "layers.5"]
    assert main([*arguments, *demands, "--out", str(path)]) == 0
    chunks = read_plan(path).partition.chunks
    assert chunks[-1] == (9,)
    assert any({1, 2, 3} <= set(chunk) for chunk in chunks)
    assert 6 in [chunk[0] for chunk in chunks]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--schedule", "zb", "--alone", "epilogue"], "write schedule 'auto', not 'zb'"),
        (["--partition", "even", "--alone", "epilogue"], "drop one of the two"),
        (["--alone", "head"], "item 'head' is unknown"),
        (["--layout", "Et*8L"], "1 stages for 4 devices; write a multiple of 4"),
        (["--layout", "Et*8L", "--partition", "even"], "not allowed with argument"),
    ],
)
def test_what_cannot_be_is_said(arguments, more, message, capsys):
    assert main([*arguments, *more]) == 2
    assert message in capsys.readouterr().err
