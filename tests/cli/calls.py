"""Calls of the command line, and what they print."""

from __future__ import annotations

import re

from lightning_zb.cli import main
from lightning_zb.planning.costs import CostModel, LayerCost, LayerRole, Link

NUM_DEVICES = 4


def model(num_layers=8, scale=1.0, head=0.0, link=None):
    """Equal layers, `num_layers / 4` of them a stage of F = B = W = 6 ms and 4 KiB; a head of so many layers' work."""
    share = scale * NUM_DEVICES / num_layers
    layers = [
        LayerCost(f"layers.{i}", 6e-3 * share, 6e-3 * share, 6e-3 * share, 4096 * share, 0.0, 1024.0, 64.0 * scale)
        for i in range(num_layers)
    ]
    if head:
        layers.append(LayerCost("head", head * 6e-3 * share, head * 6e-3 * share, head * 6e-3 * share, role=LayerRole.EPILOGUE))
    return CostModel(tuple(layers), link or Link())


def plan_arguments(costs, *more):
    return ["plan", "--costs", str(costs), "--devices", "4", "--microbatches", "8", *more]


def compare_arguments(costs, schedules, *more):
    return ["compare", "--costs", *map(str, costs), "--devices", "4", "--schedules", schedules, *more]


def rows_of(table):
    """The rows of a printed table by their first cell."""
    return {cells[0]: cells for cells in (re.split(r"\s{2,}", line.strip()) for line in table.splitlines())}


def bad_input(capsys, *argv):
    """The one sentence that a wrong call prints."""
    assert main([str(a) for a in argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err
