"""What bad input gets: one clear sentence, on every rank, a non-zero exit code, and no hang."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.lightning.bad_modules import AT_SETUP, IN_STEP
from tests.lightning.processes import run_ranks

pytestmark = pytest.mark.distributed


def _run(name: str, directory: Path, seconds: float) -> tuple[list[int | None], list[str]]:
    return run_ranks("tests.lightning.bad_worker", [str(directory), name], 2, directory, seconds)


def test_refused_at_setup(tmp_path):
    codes, outputs = _run("setup", tmp_path, 120)
    assert codes == [1, 1], outputs
    everyone = [json.loads((tmp_path / f"messages{rank}.json").read_text()) for rank in range(2)]
    assert everyone[0] == everyone[1]
    for case, (_, _, pattern) in AT_SETUP.items():
        message = everyone[0].get(case, "")
        assert re.search(pattern, message), (case, message)
        assert "\n" not in message.strip(), (case, message)


@pytest.mark.parametrize("case", IN_STEP)
def test_refused_in_a_step(case, tmp_path):
    """The rank that notices shows the cause; the other ends within seconds and names it as the lost peer."""
    start = time.monotonic()
    codes, outputs = _run(case, tmp_path, 100)
    seconds = time.monotonic() - start
    assert all(code not in (0, None) for code in codes), (codes, outputs)
    assert any(re.search(IN_STEP[case][1], output) for output in outputs), outputs
    assert seconds < 60, f"{case} took {seconds:.0f} s to end"
