"""`compare`: schedules and microbatch sizes, ranked."""

from __future__ import annotations

import re

import pytest

from lightning_zb.cli import main
from lightning_zb.cli.baselines import BASELINES
from lightning_zb.planning.costs import Link
from lightning_zb.planning.planfile import write_costs
from lightning_zb.planning.planner import make_plan
from lightning_zb.planning.registry import known_schedules
from lightning_zb.planning.schedule import PassKind
from tests.cli.calls import bad_input, compare_arguments, model, rows_of


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
    message = bad_input(capsys, *compare_arguments([costs], "1f1b,x"))
    assert "--schedules: schedule 'x' is unknown" in message
    assert all(name in message for name in (*known_schedules(), *BASELINES))
