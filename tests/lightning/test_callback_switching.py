"""Another order, partition or placement in the middle of training changes no bit of weights, states and losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_zb.switching import Move, plan_moves
from tests.lightning.fitting import Case, differences, run
from tests.lightning.processes import run_cases

SWITCHES: dict[str, dict[int, tuple[str, Any]]] = {
    "order": {2: ("wave-2", "even"), 5: ("zb-v", "even")},
    "partition": {2: ("zb-v", [1, 4, 2, 1]), 6: ("zb-v", [3, 1, 1, 3])},
    "placement": {3: ("1f1b", "even"), 5: ("zb-v", "even"), 7: ("interleaved", "even")},
}


def _case(name: str, switches: dict[int, tuple[str, Any]], devices: int, virtual: bool, **options: Any) -> Case:
    strategy: dict[str, Any] = {"schedule": "zb-v", **({"virtual_devices": devices} if virtual else {})}
    return Case(
        name, "switching", {"switches": switches, **options}, {"gradient_clip_val": 0.5}, strategy=strategy,
        devices=1 if virtual else devices, size=36, batch_size=2, accumulate=4,
    )  # fmt: skip


@pytest.mark.parametrize("switch", SWITCHES)
def test_virtual_devices(switch: str, tmp_path: Path):
    case = _case("run", SWITCHES[switch], 2, virtual=True, groups=True)
    result, plain = run(case, tmp_path / "ours"), run(case.plain(), tmp_path / "plain")
    assert differences([result], plain) == []


@pytest.mark.distributed
def test_processes(tmp_path: Path):
    """Parameters, Adam's moments and buffers move between two processes; tied ends too."""
    cases = [_case(name, switches, 2, virtual=False) for name, switches in SWITCHES.items()]
    cases.append(_case("tied", {3: ("zb-h1", "even"), 6: ("zb-v", [1, 4, 2, 1])}, 2, virtual=False, tied=True))
    cases.append(_case("groups", {3: ("zb-h1", "even"), 6: ("zb-v", [1, 4, 2, 1])}, 2, virtual=False, groups=True, frozen=3))
    cases.append(_case("raw", {3: ("zb-h1", "even"), 6: ("zb-v", [1, 4, 2, 1])}, 2, virtual=False, raw_positions=True))
    cases.append(_case("parted", {3: ("zb-v", "even"), 6: ("1f1b", "even")}, 2, virtual=False, raw_positions=True))
    results = run_cases(cases, 2, tmp_path)
    found = {}
    for case in cases:
        plain = run(case.plain(), tmp_path / "plain")
        parts = results[case.name]
        found[case.name] = differences(parts, plain)
        assert all(part["own_bytes"] < plain["own_bytes"] for part in parts), f"{case.name}: a rank holds the whole model"
    assert all(not d for d in found.values()), found


@pytest.mark.distributed
@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_default_schedule_moves_layers_on_the_way(devices: int, tmp_path: Path):
    """zb-v until layers are measured, then what `auto` makes of them, be it better or not; the same bits throughout."""
    callback = {"profile_steps": (1, 3), "background": False, "min_gain": -9.0, "plan_seconds": 2.0}
    case = Case(
        "run", "hybrid", trainer={"gradient_clip_val": 0.5, "max_epochs": 1}, strategy={}, callback=callback, devices=devices,
        size=80, batch_size=2, accumulate=4,
    )  # fmt: skip
    parts = run_cases([case], devices, tmp_path)["run"]
    plain = run(case.plain(), tmp_path / "plain")
    assert differences(parts, plain) == []
    for part in parts:
        first = part["decisions"][0]
        assert first.change == "placement"
        assert first.reason.startswith("auto, new placement")


def test_every_rank_gets_what_it_lacks():
    held = [frozenset("ab"), frozenset("bc")]
    answers = [frozenset("a"), frozenset("bc")]
    needed = [frozenset("c"), frozenset("ab")]
    assert plan_moves("abc", answers, held, needed) == [Move("a", 0, 1), Move("c", 1, 0)]
