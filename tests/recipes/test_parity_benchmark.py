"""The parity matrix: it tells bits apart, and tells refusals from failures."""

import json
from dataclasses import asdict

import pytest
import torch

from recipes.benchmarks import parity
from recipes.benchmarks.parity import Cell, Setting, compare, measure, report

PRECISION = "32-true"


def _setting(model, schedule="zb-v", devices=2):
    return Setting(model, schedule, devices, PRECISION, False)


def test_one_bit_is_seen():
    plain = {"weight a": torch.tensor([1.0, -2.0]), "losses": torch.ones(2)}
    assert compare(plain, plain) == (0.0, "2 tensors")
    other = {**plain, "weight a": torch.nextafter(plain["weight a"], torch.zeros(2))}
    difference, detail = compare(other, plain)
    assert 0 < difference < 1e-6
    assert detail == "1 of 2 tensors, most weight a"
    assert compare({**plain, "losses": torch.full((2,), torch.nan)}, plain)[1] == "1 of 2 tensors, most losses"


def test_a_missing_tensor_is_no_parity():
    with pytest.raises(RuntimeError, match="only one of the two runs has"):
        compare({}, {"losses": torch.ones(1)})


def test_models_are_compared_and_refused(tmp_path):
    plain = parity.train("hidden + residual", PRECISION)
    cells = [measure(_setting("hidden + residual"), plain), measure(_setting("llama, deep supervision"), {})]
    assert [c.verdict for c in cells] == ["bitwise", "refused"]
    assert "output_hidden_states=True" in cells[1].detail
    for change, verdict in [(1e-6, "bounded"), (0.1, "failed"), (torch.nan, "failed")]:
        other = {**plain, "losses": plain["losses"] * (1 + change)}
        assert measure(_setting("hidden + residual"), other).verdict == verdict
    file = tmp_path / "cells.jsonl"
    file.write_text("".join(json.dumps(asdict(c)) + "\n" for c in cells))
    assert parity.read_cells(file) == cells


def test_a_broken_model_is_no_refusal(monkeypatch):
    monkeypatch.setitem(parity.MODELS, "broken", lambda: torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(8))))
    assert measure(_setting("broken"), {}).verdict == "failed"


def test_the_report_names_what_is_not_bitwise():
    cells = [
        Cell(_setting("llama"), "bitwise", 0.0, "9 tensors", 1.0),
        Cell(_setting("gpt2", "1f1b", 4), "bounded", 2e-7, "1 of 9 tensors, most weight w", 1.0),
    ]
    text = report(cells, "command")
    assert "| model | zb-v P=2 | 1f1b P=4 |" in text
    assert "| llama | = |  |" in text
    assert "| gpt2 |  | 2.0e-07 |" in text
    assert "- gpt2, bounded: 1 of 9 tensors, most weight w (1f1b P=4)" in text
