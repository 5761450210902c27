"""`lightning-zb profile`: the costs file it writes is what the layers take, and wrong input is one sentence."""

from __future__ import annotations

import statistics
import time

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_zb.cli import main
from lightning_zb.planning.costs import LayerRole, Link
from lightning_zb.planning.planfile import read_costs
from tests.lightning.emulated import WIDTH, SleepingModule
from tests.lightning.models import KernelModule, Vectors

HERE = "tests.cli.test_profiling"
made: list[SleepingModule] = []


def sleeping(milliseconds):
    made.append(SleepingModule(milliseconds))
    return made[-1]


class SlowStart(SleepingModule):
    """Sleeps before its layers, as code does that every chunk runs again."""

    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


def slow_start(milliseconds):
    return SlowStart(milliseconds)


def loader(size=8):
    return DataLoader(Vectors(size), batch_size=1)


def one_batch():
    return torch.zeros(3, WIDTH), torch.zeros(3, 1)


def wrong_batch():
    return torch.zeros(3, WIDTH + 1), torch.zeros(3, 1)


def kernels():
    return KernelModule()


class Unfinished(L.LightningModule):
    def __init__(self, **options):
        super().__init__()


def broken():
    raise KeyError("no such\nthing")


def arguments(out, *more, module="sleeping", milliseconds="[[1, 1, 1], [1, 2, 1]]"):
    place = ["--module", f"{HERE}:{module}", "--arguments", f'{{"milliseconds": {milliseconds}}}']
    return ["profile", *place, "--out", str(out), *map(str, more)]


@pytest.mark.parametrize("source", [("--data", f"{HERE}:loader"), ("--batch", f"{HERE}:one_batch")], ids=["data", "batch"])
def test_the_file_it_writes_is_what_plan_reads(source, tmp_path, capsys):
    out = tmp_path / "costs.json"
    links = ("--latency", "2e-5", "--bandwidth", "25GB")
    assert main(arguments(out, *source, "--steps", 1, "--microbatches", 2, *links)) == 0
    text = capsys.readouterr().out
    costs = read_costs(out)
    assert [c.role for c in costs.layers] == [LayerRole.PROLOGUE, LayerRole.LAYER, LayerRole.LAYER, LayerRole.EPILOGUE]
    rows = 3 if source[0] == "--batch" else 1
    assert [c.activation_bytes for c in costs.layers[1:3]] == [rows * WIDTH * 4] * 2
    assert costs.link == Link(2e-5, 25e9)
    assert f"written to {out}" in text
    assert "layers.1" in text
    assert "count as free" not in text
    assert main(["plan", "--costs", str(out), "--devices", "2", "--microbatches", "4", "--schedule", "zb-1p"]) == 0
    capsys.readouterr()


@pytest.mark.slow
def test_the_times_of_layers_are_found(tmp_path, capsys):
    """Within 3 % of what each layer notes itself: on a busy machine it sleeps longer than it was told to."""
    out = tmp_path / "costs.json"
    milliseconds = "[[60, 90, 75], [120, 60, 60], [75, 75, 135], [75, 135, 60]]"
    steps = ("--steps", 6, "--microbatches", 2)
    assert main(arguments(out, "--data", f"{HERE}:loader", *steps, milliseconds=milliseconds)) == 0
    assert "transfers between devices count as free" in capsys.readouterr().out
    for layer, cost in zip(made[-1].layers, read_costs(out).layers[1:-1], strict=True):
        for part, seconds in zip("FBW", (cost.forward, cost.backward_input, cost.backward_weight), strict=True):
            slept = statistics.median(layer.slept[part][-12:])  # of the steps that took times
            assert seconds == pytest.approx(slept, rel=0.03), (cost.name, part)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--module", "sleeping"], "--module: 'sleeping' is not a place such as package.module:Name"),
        (
            ["--module", "no.such.module:Model"],
            "--module no.such.module:Model: no.such.module cannot be imported, ModuleNotFound",
        ),
        (["--module", f"{HERE}:Nothing"], f"--module {HERE}:Nothing: {HERE} has no Nothing"),
        (["--module", f"{HERE}:HERE"], f"--module {HERE}:HERE: is a str; name a class or a function"),
        (["--module", f"{HERE}:loader", "--arguments", "{}"], "is a DataLoader, not a lightning.pytorch.LightningModule"),
        (["--arguments", "{depth: 1}"], "--arguments: '{depth: 1}' is not JSON"),
        (["--arguments", "[1]"], "--arguments: '[1]' is not a JSON object"),
        (["--arguments", '{"depth": 1}'], "TypeError: sleeping() got an unexpected keyword argument 'depth'"),
        (["--data", f"{HERE}:broken"], f"--data {HERE}:broken: KeyError: 'no such\\nthing'"),
        (["--data", f"{HERE}:loader", "--batch", f"{HERE}:one_batch"], "--batch: not allowed with argument --data"),
        (["--data-arguments", '{"size": 2}'], "--data-arguments: there is no --data"),
        (["--steps", "0"], "--steps: '0' is not a count"),
        (["--bandwidth", "fast"], "--bandwidth: 'fast' is not a number of bytes a second"),
        (["--latency", "-1"], "--latency: '-1' is not a number of seconds, 0 or more"),
        (["--latency", "nan"], "--latency: 'nan' is not a number of seconds, 0 or more"),
        (["--device", "tpu"], "--device: invalid choice: 'tpu'"),
        (["--out", "/no/such/folder/costs.json"], "--out /no/such/folder/costs.json: there is no folder /no/such/folder"),
        (
            ["--module", f"{HERE}:Unfinished", "--batch", f"{HERE}:one_batch"],
            f"--module {HERE}:Unfinished: No `training_step()`",
        ),
        (
            ["--batch", f"{HERE}:one_batch", "--arguments", '{"milliseconds": [[1, 1, 1]]}'],
            "the model has one layer, so a pipeline has nothing to divide",
        ),
        (["--layers", "head", "--batch", f"{HERE}:one_batch"], 'layers="head" is a Linear'),
        (["--batch", f"{HERE}:wrong_batch"], ": its step failed in tests/lightning/emulated.py, line "),
        ([], "has no train_dataloader of its own; write --data or --batch"),
    ],
)
def test_wrong_input_is_one_sentence(more, message, tmp_path, capsys):
    options = arguments(tmp_path / "costs.json")
    assert main([*options, *more]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not (tmp_path / "costs.json").exists()


def test_it_says_which_share_of_w_can_move(tmp_path, capsys):
    """Layers 0 and 2 have 384 weights in linear operators and 600 in a kernel that computes all its gradients in B."""
    place = ["--module", f"{HERE}:kernels", "--data", f"{HERE}:loader"]
    few = ["--steps", "1", "--microbatches", "2", "--latency", "0"]
    assert main(["profile", *place, "--out", str(tmp_path / "costs.json"), *few]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    for layer in range(4):
        assert rows[f"layers.{layer}"].endswith("100.0 %" if layer % 2 else f"{100 * 384 / 984:.1f} % (Kernel whole in B)")
    assert rows["epilogue"].endswith("100.0 %")


def test_what_every_chunk_runs_again_is_measured(tmp_path, capsys):
    """The overhead of a pass, which is part of no layer."""
    out = tmp_path / "costs.json"
    more = ("--data", f"{HERE}:loader", "--steps", 3, "--microbatches", 2)
    assert main(arguments(out, *more, module="slow_start", milliseconds="[[20, 1, 1], [20, 1, 1]]")) == 0
    costs = read_costs(out)
    assert 0.02 < costs.overhead.forward < 0.04
    assert all(layer.forward < 0.04 for layer in costs.layers)
    assert "besides its layers a pass takes 2" in capsys.readouterr().out


def test_layers_that_take_less_than_the_overhead_of_their_pass_varies_are_not_free(tmp_path, capsys):
    out = tmp_path / "costs.json"
    more = ("--data", f"{HERE}:loader", "--steps", 4, "--microbatches", 2)
    assert main(arguments(out, *more, module="slow_start", milliseconds="[[0, 0, 0], [0, 0, 0], [0, 0, 0]]")) == 0
    layers = [layer for layer in read_costs(out).layers if layer.role is LayerRole.LAYER]
    assert min(layer.forward for layer in layers) > 0.0
    assert min(layer.backward_input for layer in layers) > 0.0
    capsys.readouterr()
