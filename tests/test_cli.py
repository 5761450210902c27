import csv
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_zb.cli import main
from lightning_zb.cli.baselines import BASELINES
from lightning_zb.planning.costs import CostModel, LayerCost, LayerRole, Link
from lightning_zb.planning.planfile import read_plan, write_costs
from lightning_zb.planning.planner import make_plan
from lightning_zb.planning.registry import known_schedules
from lightning_zb.planning.schedule import PassKind
from lightning_zb.planning.torch_csv import from_csv

NUM_DEVICES, NUM_MICROBATCHES = 4, 8
HEAVY = {"torch", "lightning", "matplotlib"}


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


@pytest.fixture
def costs(tmp_path):
    path = tmp_path / "costs.json"
    write_costs(model(), path)
    return path


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
    assert f"{tmp_path / 'none.json'}: No such file" in bad_input(capsys, *plan_arguments(tmp_path / "none.json"))
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


def test_compare_ranks_schedules(costs, capsys):
    arguments = compare_arguments([costs], "1f1b,zb-1p,auto,zb-v", "--microbatches", "8", "--memory-budget", "1.0")
    assert main([*arguments, "--effort", "2"]) == 0
    text = capsys.readouterr().out
    header, *lines = text.splitlines()
    assert "step_time (ms)" in header
    assert "period" in header
    names = [line.split()[0] for line in lines]
    assert set(names) == {"1f1b", "zb-1p", "zb-v", "auto"}
    assert names[-1] == "1f1b"
    rows = rows_of(text)
    times = [float(rows[name][1]) for name in names]
    assert times == sorted(times)
    assert rows["1f1b"][3] == "198.00"  # makespan of 33 stages of work
    assert rows["zb-1p"][3] == "162.00"
    assert rows["1f1b"][-1] == "16.00 12.00 8.00 4.00"
    assert all(float(rows[name][6]) <= float(rows[name][1]) + 0.01 for name in names)


def test_compare_leaves_out_what_does_not_fit(costs, capsys):
    arguments = compare_arguments([costs], "zb-2p,zb-h2,zb-1p", "--microbatches", "8", "--memory-budget")
    assert main([*arguments, "1.0"]) == 0
    text = capsys.readouterr().out
    assert set(rows_of(text)) >= {"zb-1p"}
    assert "zb-2p: infeasible; the smallest --memory-budget that fits is 1." in text
    assert main([*arguments, "0.3"]) == 3
    assert capsys.readouterr().out.count("infeasible") == 3


def test_compare_baselines_use_their_own_partition(tmp_path, capsys):
    path = tmp_path / "costs.json"
    write_costs(model(head=4.0), path)
    names = "s-1f1b,i-1f1b,mist,hanayo,1f1b"
    assert main(compare_arguments([path], names, "--microbatches", "8", "--partition", "balanced")) == 0
    rows = rows_of(capsys.readouterr().out)
    assert not set(names.split(",")[:4]) & set(known_schedules())  # else a name would mean two things
    assert float(rows["s-1f1b"][1]) > float(rows["mist"][1])  # the even partition leaves the head with the last layers
    assert rows["mist"][1:9] == rows["1f1b"][1:9]
    for name, schedule in (("i-1f1b", "interleaved"), ("hanayo", "wave-1f1b")):
        expected = make_plan(model(head=4.0), 4, 8, schedule=schedule, partition="even")
        assert float(rows[name][1]) == pytest.approx(1e3 * expected.predicted.step_time, abs=0.01)


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_baselines_keep_the_backward_whole_and_pay_for_links(name):
    """None of them splits the backward (the second paper's table of approaches); the authors' simulator charges no link."""
    baseline = BASELINES[name]
    free, slow = (
        make_plan(model(link=link), 4, 8, baseline.schedule, partition=baseline.partition) for link in (None, Link(1e-3))
    )
    assert {p.kind for p in free.schedule.passes()} == {PassKind.FORWARD, PassKind.BACKWARD}
    assert slow.schedule == free.schedule
    assert slow.predicted.step_time > free.predicted.step_time


def test_compare_says_what_each_phase_gains(tmp_path, capsys):
    path = tmp_path / "costs.json"
    write_costs(model(num_layers=16, head=6.0), path)
    arguments = compare_arguments([path], "s-1f1b", "--microbatches", "8", "--memory-budget", "2.0", "--effort", "2")
    assert main([*arguments, "--ablation"]) == 0
    rows = rows_of(capsys.readouterr().out)
    phases = ("partition", "placement", "schedule")
    alone = {name: float(rows[name][2]) for name in phases}
    pairs = {f"{a} + {b}": float(rows[f"{a} + {b}"][2]) for a, b in (phases[:2], phases[::2], phases[1:])}
    together = rows["partition + placement + schedule"]
    assert rows["none (1f1b)"][1:3] == [rows["s-1f1b"][1], "1.000"]
    assert min(alone.values()) >= 1.0
    assert float(together[2]) >= max(*alone.values(), *pairs.values()) > max(alone.values()) > 1.0
    assert float(together[1]) == pytest.approx(float(rows["s-1f1b"][1]) / float(together[2]), rel=1e-3)
    assert main([*arguments[:-4], "--memory-budget", "0.1", "--ablation"]) == 3
    assert "infeasible below" in rows_of(capsys.readouterr().out)["none (1f1b)"][1]


def test_compare_microbatch_sizes_at_equal_memory(tmp_path, capsys):
    """The trade-off of the first paper's Tables 6 and 7: at equal memory half the size has more room to hide bubbles."""
    small, large = tmp_path / "small.json", tmp_path / "large.json"
    write_costs(model(), small)
    write_costs(model(scale=2.0), large)
    files = [f"{small}:16", f"{large}:8"]
    assert main(compare_arguments(files, "1f1b,zb-2p", "--memory-budget", "2.0")) == 0
    text = capsys.readouterr().out
    order = [(line.split()[0], line.split()[1]) for line in text.splitlines()[1:]]
    assert order[0] == ("zb-2p", "small:16")
    assert set(order[1:3]) == {("1f1b", "small:16"), ("1f1b", "large:8")}
    # zb-2p holds as much again at twice the microbatch size; in activations of the first file
    needed = float(re.search(r"zb-2p \(large:8\): infeasible; the smallest --memory-budget that fits is (\S+)", text)[1])
    assert 2.0 < needed <= 4.0
    assert main(compare_arguments(files, "zb-2p", "--memory-budget", str(needed))) == 0
    assert "infeasible" not in capsys.readouterr().out


def test_compare_needs_microbatches(costs, capsys):
    assert f"--costs {costs}: has no microbatches" in bad_input(capsys, *compare_arguments([costs], "1f1b"))
    assert "--schedules: schedule 'x' is unknown" in bad_input(capsys, *compare_arguments([costs], "1f1b,x"))


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
