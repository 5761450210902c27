"""Processes that measured, moved layers and saved: a resumed run starts with that plan, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lightning.fitting import Case, differences, run
from tests.lightning.processes import run_cases


@pytest.mark.distributed
def test_two_processes_resume_with_the_plan_in_force(tmp_path: Path):
    """One epoch cut 1:7 at first, re-cut by measured times; a second one from the checkpoint, in the new cut at once."""
    path = str(tmp_path / "saved.ckpt")
    strategy = {"schedule": "zb", "memory_budget": 1.5, "partition": [1, 7]}
    common = {"strategy": strategy, "devices": 2, "size": 40, "shuffle": False, "model_options": {"groups": True}}
    measures = {"profile_steps": (1, 3), "replan": "partition", "background": False}
    cases = [
        Case("first", "tokens", trainer={"max_epochs": 1}, save=path, callback=measures, **common),
        Case("second", "tokens", trainer={"max_epochs": 2}, resume=path, callback={"profile_steps": (99, 101)}, **common),
    ]
    results = run_cases(cases, 2, tmp_path)
    plain = run(Case("plain", "tokens", trainer={"max_epochs": 2}, **common).plain(), tmp_path)
    first, second = results["first"], results["second"]
    assert [[d.change for d in part["decisions"]] for part in first] == [["partition"]] * 2
    assert first[0]["partition"] != [2, 8]  # with prologue and epilogue
    assert all(part["partition"] == first[0]["partition"] for part in second)
    assert all(part["decisions"] == first[0]["decisions"] for part in second)
    plain["log"], plain["rates"] = second[0]["log"], second[0]["rates"]  # of the second epoch only
    assert differences(second, plain) == []
