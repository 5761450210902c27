"""What a run leaves behind in the process that started it."""

from __future__ import annotations

import os

from tests.lightning.fitting import Case, run


def test_one_process_leaves_the_environment_alone(tmp_path):
    """Else a script started from here would take itself for a rank and wait for the others."""
    before = dict(os.environ)
    run(Case("run", "sequential", strategy={"virtual_devices": 2}, size=8), tmp_path)
    changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
    assert not changed & {"LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
