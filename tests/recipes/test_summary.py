"""Summaries survive their file, and their table says what they hold."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from lightning_zb import ZeroBubbleCallback
from recipes.summary import FILE_NAME, HEADER, LEGEND, Summary, _schedule, format_table, main, read_summary

SUMMARY = Summary(
    schedule="zb-v",
    memory_budget=1.5,
    num_devices=2,
    num_microbatches=8,
    num_steps=60,
    step_time_predicted=0.75,
    step_time_measured=0.8,
    bubble_predicted=0.05,
    bubble_measured=0.0625,
    peak_memory=(512 * 2**20, 256 * 2**20),
    tokens_per_second=5120.0,
    train_loss=2.0,
    val_loss=2.25,
    val_bits_per_byte=3.25,
)


def test_file_round_trip(tmp_path):
    SUMMARY.write(tmp_path / "job")
    assert read_summary(tmp_path / "job" / FILE_NAME) == SUMMARY


def test_table_has_a_column_for_each_value_and_a_dash_for_what_is_missing():
    plain = replace(SUMMARY, schedule="plain", memory_budget=None, step_time_predicted=None, bubble_predicted=None)
    header, _, first, second = format_table([SUMMARY, plain]).splitlines()
    assert len(header) == len(first) == len(second)
    expected = "zb-v 1.5 0.750 s 0.800 s 5.0% 6.2% 5120 512, 256 MiB 2.0000 2.2500 3.250"
    assert first.split() == expected.split()
    assert second.split()[:5] == ["plain", "-", "-", "0.800", "s"]


def test_table_of_all_jobs_below_a_folder(tmp_path, capsys):
    for job, budget in enumerate([0.75, 1.0, 2.0]):
        replace(SUMMARY, memory_budget=budget).write(tmp_path / str(job))
    main([str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[2:5]] == ["0.75", "1", "2"]
    assert "\n".join(lines[5:]) == LEGEND


def test_every_column_of_two_is_explained():
    explained = [line.split(":")[0] for line in LEGEND.splitlines()]
    assert {name.split()[0] for name in HEADER if name.endswith("predicted")} <= set(explained)


def test_folder_without_summaries_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        main([str(tmp_path)])


@pytest.mark.parametrize(
    ("asked", "runs", "has_decided", "expected"),
    [
        ("zb-v", "zb-v", True, "zb-v"),
        ("auto", "auto", True, "auto"),
        ("auto", "zb-v", False, "auto (zb-v until measured)"),
        ("auto", "zb-v", True, "auto (zb-v)"),
    ],
)
def test_what_stands_in_for_auto_is_named(asked: str, runs: str, has_decided: bool, expected: str):
    callback = ZeroBubbleCallback()
    callback.decisions = ["a decision"] * has_decided
    strategy = SimpleNamespace(plan_request=SimpleNamespace(schedule=asked))
    plan = SimpleNamespace(planner=SimpleNamespace(name=runs))
    assert _schedule(SimpleNamespace(strategy=strategy, callbacks=[callback]), plan) == expected
