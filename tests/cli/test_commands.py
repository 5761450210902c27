"""The commands that make or read one plan, and what is said of wrong input."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_zb.cli import main
from lightning_zb.planning.costs import CostModel
from lightning_zb.planning.planfile import read_plan, write_costs
from lightning_zb.planning.planner import make_plan
from lightning_zb.planning.torch_csv import from_csv
from tests.cli.calls import bad_input, model, plan_arguments, rows_of

HEAVY = {"torch", "lightning", "matplotlib"}


def test_a_world_is_split_into_the_fastest_pipelines(costs, capsys):
    arguments = ["plan", "--costs", str(costs), "--microbatches", "8", "--schedule", "1f1b"]
    assert main([*arguments, "--world-size", "4"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert {"1 x 4", "2 x 2", "4 x 1"} <= set(rows)
    assert rows["1 x 4"][2] == "0.00"


def test_devices_or_a_world_but_not_both(costs, capsys):
    message = "write either --devices P, or --world-size N"
    assert message in bad_input(capsys, "plan", "--costs", costs, "--microbatches", "8")
    assert message in bad_input(capsys, *plan_arguments(costs, "--world-size", "4"))


def test_plan_writes_what_the_library_plans(costs, tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert main(plan_arguments(costs, "--schedule", "zb-1p", "--out", str(out))) == 0
    plan = read_plan(out)
    expected = make_plan(model(), 4, 8, schedule="zb-1p")
    assert (plan.schedule, plan.partition, plan.placement) == (expected.schedule, expected.partition, expected.placement)
    assert plan.predicted.makespan == pytest.approx(27 * 6e-3)  # 3m + P - 1 stages of work
    assert plan.predicted.lower_bound <= plan.predicted.step_time
    text = capsys.readouterr().out
    assert "zb-1p: 4 devices, 4 chunks, 8 microbatches" in text
    assert "makespan     162 ms" in text


def test_a_plan_that_meets_its_bound_is_reported_as_optimal(costs, tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert main(plan_arguments(costs, "--schedule", "zb-2p", "--out", str(out))) == 0
    plan = read_plan(out)
    assert plan.planner.status.value == "optimal"
    assert plan.predicted.step_time == plan.predicted.lower_bound == pytest.approx(24 * 6e-3)  # no bubble
    assert "gap 0.00 %" in capsys.readouterr().out


def test_plan_searches_by_default_and_hands_its_options_on(costs, tmp_path, capsys):
    files = [tmp_path / f"{name}.json" for name in "ab"]
    for file in files:
        arguments = ("--memory-budget", "1.0", "--objective", "makespan", "--effort", "2", "--seed", "3", "--seconds", "60")
        assert main(plan_arguments(costs, *arguments, "--out", str(file))) == 0
    first, second = map(read_plan, files)
    assert first.planner.name == "auto"
    assert "of makespan" in first.planner.reason
    assert first.schedule == second.schedule
    assert max(first.predicted.peak_bytes) <= 4 * 4096
    capsys.readouterr()


def test_search_options_are_left_out_for_schedules_that_do_not_search(costs, capsys):
    assert main(plan_arguments(costs, "--schedule", "1f1b", "--effort", "3", "--seed", "1", "--seconds", "9")) == 0
    capsys.readouterr()


def test_partition_counts(costs, tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert main(plan_arguments(costs, "--schedule", "1f1b", "--partition", "1,2,2,3", "--out", str(out))) == 0
    assert [len(chunk) for chunk in read_plan(out).partition.chunks] == [1, 2, 2, 3]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("budget", "smallest"),
    [("0.5", "1.0"), ("10KiB", "1MiB"), ("2.0,2.0,0.25,2.0", "1.0,0.75,0.5,0.25")],
    ids=["number", "size", "per device"],
)
def test_infeasible_prints_the_smallest_budget_that_then_works(costs, capsys, budget, smallest):
    arguments = plan_arguments(costs, "--schedule", "1f1b", "--memory-budget")
    assert main([*arguments, budget]) == 3
    captured = capsys.readouterr()
    assert captured.out == f"smallest feasible --memory-budget: {smallest}\n"
    assert main([*arguments, smallest]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--devices", "0", "--devices: '0' is not a count"),
        ("--microbatches", "two", "--microbatches: 'two' is not a count"),
        ("--memory-budget", "-1", "--memory-budget: "),
        ("--memory-budget", "40 gigs", "--memory-budget: memory budget '40 gigs' is not a size"),
        ("--memory-budget", "1.0,1.0", "memory_budget [1.0, 1.0] has 2 entries for 4 devices"),
        ("--schedule", "zb-3p", "--schedule: schedule 'zb-3p' is unknown; known are 1f1b"),
        ("--partition", "odd", "--partition: 'odd' is not auto, even, balanced, or layer counts"),
        ("--objective", "speed", "--objective: invalid choice: 'speed'"),
        ("--seconds", "0", "--seconds: '0' is not a positive number"),
        ("--effort", "0", "--effort: '0' is not a count"),
        ("--seed", "-1", "--seed: "),
    ],
)
def test_a_bad_option_is_named(costs, capsys, option, value, message):
    assert message in bad_input(capsys, *plan_arguments(costs, "--schedule", "1f1b"), f"{option}={value}")


def test_bad_files_are_named(costs, tmp_path, capsys):
    missing = tmp_path / "none.json"
    assert f"there is no file {missing}; write the path" in bad_input(capsys, *plan_arguments(missing))
    assert f"there is no file {missing}; write the path" in bad_input(capsys, "show", str(missing))
    assert f"{tmp_path} is a folder; write the path" in bad_input(capsys, "show", str(tmp_path))
    data = json.loads(costs.read_text())
    broken = tmp_path / "broken.json"

    def broken_by(**change):
        broken.write_text(json.dumps(data | change))
        return bad_input(capsys, *plan_arguments(broken))

    layers = [*data["layers"][:-1], data["layers"][-1] | {"forward": -1}]
    assert f"{broken}: layers[7].forward: -1 is negative" in broken_by(layers=layers)
    assert f"{broken}: device_speed: has 3 entries for 4 devices" in broken_by(device_speed=[1.0, 1.0, 2.0])
    assert f"{broken}: link: has rows of [1] links" in broken_by(link=[[{"latency": 0.0}]])
    assert f"{broken}: links: is not a known field; known are device_speed, layer" in broken_by(links=[])
    assert f"{broken}: passes: belongs to a plan file" in broken_by(passes=[])
    broken.write_text("{")
    for command in ("simulate", "show"):
        assert f"{broken}: not JSON" in bad_input(capsys, command, broken)
        assert f"{costs}: is a costs file; write a plan file, which lightning-zb plan" in bad_input(capsys, command, costs)


def test_a_file_that_cannot_be_written_is_named_before_any_work(costs, plan_file, tmp_path, capsys):
    nowhere = tmp_path / "no" / "x.json"
    assert f"--out {nowhere}: there is no folder {nowhere.parent}" in bad_input(
        capsys, *plan_arguments(costs), "--out", nowhere
    )
    assert f"--out {tmp_path}: is a folder" in bad_input(capsys, *plan_arguments(costs), "--out", tmp_path)
    assert "--png x.jpg: a picture in png needs a name that ends with .png" in bad_input(
        capsys, "show", plan_file, "--png", "x.jpg"
    )


def test_a_budget_in_activations_needs_them(tmp_path, capsys):
    """Nothing counts as 1.0 where no layer says what its activations are."""
    path = tmp_path / "costs.json"
    layers = tuple(replace(layer, activation_bytes=0.0, weight_stash_bytes=1.0) for layer in model().layers)
    write_costs(CostModel(layers), path)
    arguments = plan_arguments(path, "--schedule", "zb", "--memory-budget", "1.0")
    assert "memory_budget=1.0 counts in activation_bytes, which are 0 for every layer" in bad_input(capsys, *arguments)


def test_options_are_written_in_full(costs, capsys):
    assert "unrecognized arguments: --schedul 1f1b" in bad_input(capsys, *plan_arguments(costs), "--schedul", "1f1b")


def test_a_missing_option_and_a_missing_command_are_named(costs, capsys):
    assert "--microbatches" in bad_input(capsys, "plan", "--costs", costs, "--devices", "4")
    assert "COMMAND" in bad_input(capsys)


@pytest.fixture
def plan_file(costs, tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main(plan_arguments(costs, "--schedule", "zb-v", "--memory-budget", "1.0", "--out", str(path))) == 0
    capsys.readouterr()
    return path


def test_simulate_repeats_what_the_plan_promises(plan_file, capsys):
    assert main(["simulate", str(plan_file)]) == 0
    text = capsys.readouterr().out
    step_time = 1e3 * read_plan(plan_file).predicted.step_time
    assert f"step_time    {step_time:.5g} ms" in text
    assert "note:" not in text
    devices = rows_of(text)
    for d in range(4):
        assert devices[str(d)][1] == f"{d},{7 - d}"
        assert float(devices[str(d)][3]) == 144.0  # 8 microbatches of 18 ms


def test_simulate_reports_other_costs_and_broken_limits(plan_file, capsys):
    data = json.loads(plan_file.read_text())
    for layer in data["costs"]["layers"]:
        layer["forward"] *= 2
    data["memory_limit"] = [16384, 16384, 4096, 16384]
    plan_file.write_text(json.dumps(data))
    assert main(["simulate", str(plan_file)]) == 3
    text = capsys.readouterr().out
    assert "note: the file's predicted.step_time is" in text
    assert "devices [2] exceed memory_limit" in text


def test_simulate_takes_other_costs(plan_file, tmp_path, capsys):
    slower = tmp_path / "slower.json"
    write_costs(model(scale=2.0), slower)
    assert main(["simulate", str(plan_file), "--costs", str(slower)]) == 3  # twice the bytes too, and the plan has a limit
    text = capsys.readouterr().out
    planned = read_plan(plan_file).predicted.step_time
    assert f"step_time    {2e3 * planned:.5g} ms" in text
    assert f"note: the file's predicted.step_time is {planned:.6g} s, {slower} gives {2 * planned:.6g} s" in text
    assert "was asked for" not in text
    write_costs(model(num_layers=12), slower)
    assert "has 12 layers and the plan divides 8" in bad_input(capsys, "simulate", plan_file, "--costs", slower)


def test_show_draws_one_line_a_device(plan_file, tmp_path, capsys):
    png = tmp_path / "plan.png"
    assert main(["show", str(plan_file), "--png", str(png)]) == 0
    *lines, legend = capsys.readouterr().out.splitlines()[:-1]
    assert "the number is the microbatch" in legend
    assert [line[:9] for line in lines if line.startswith("device")] == [f"device {d} " for d in range(4)]
    assert png.read_bytes().startswith(b"\x89PNG")


def test_export(plan_file, tmp_path, capsys):
    plan = read_plan(plan_file)
    for kind in ("chrome", "csv", "svg"):
        assert main(["export", str(plan_file), "--format", kind]) == 0
    trace = json.loads((tmp_path / "plan.trace.json").read_text())
    assert sum(event["ph"] == "X" and event["name"] != "wait" for event in trace["traceEvents"]) == sum(
        map(len, plan.schedule.orders)
    )
    text = (tmp_path / "plan.csv").read_text()
    assert len(list(csv.reader(text.splitlines()))) == 4
    assert from_csv(text) == (plan.schedule, plan.placement)
    assert "<svg" in (tmp_path / "plan.svg").read_text()
    assert main(["export", str(plan_file), "--format", "csv", "--out", str(tmp_path / "other.csv")]) == 0
    assert (tmp_path / "other.csv").read_text() == text
    capsys.readouterr()
    assert "--out" in bad_input(capsys, "export", plan_file, "--format", "svg", "--out", tmp_path / "x.png")
    assert "--format: invalid choice: 'pdf'" in bad_input(capsys, "export", plan_file, "--format", "pdf")


@pytest.mark.parametrize("command", [[], ["plan"], ["simulate"], ["compare"], ["show"], ["export"]])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    assert "exit codes: 0 feasible, 3 infeasible" in capsys.readouterr().out


def test_planning_imports_neither_torch_nor_lightning(costs):
    """They take seconds, and a laptop that plans may be without them."""
    arguments = plan_arguments(costs, "--schedule", "zb-v")
    script = f"import sys; from lightning_zb.cli import main; main({arguments!r}); sys.exit(bool({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_installed_script(costs):
    script = Path(sys.executable).with_name("lightning-zb")
    arguments = plan_arguments(costs, "--schedule", "1f1b", "--memory-budget", "0.5")
    done = subprocess.run([str(script), *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 3
    assert done.stdout == "smallest feasible --memory-budget: 1.0\n"


def test_it_runs_as_a_module(costs):
    arguments = plan_arguments(costs, "--schedule", "1f1b", "--memory-budget", "none")
    done = subprocess.run([sys.executable, "-m", "lightning_zb", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("lightning-zb: --memory-budget: ")
