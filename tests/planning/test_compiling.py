"""Whether the planner's loops wait in the installation's cache."""

from __future__ import annotations

import os
import subprocess
import sys

from lightning_zb.planning.compiling import is_compiled
from lightning_zb.planning.costs import CostModel, LayerCost
from lightning_zb.planning.planner import make_plan

_ASK = "from lightning_zb.planning.compiling import is_compiled; print(is_compiled())"


def test_a_plan_leaves_compiled_loops_behind(tmp_path):
    make_plan(CostModel((LayerCost("a", 1.0, 1.0, 1.0),) * 2), 2, 2, "1f1b")
    assert is_compiled()
    empty = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    assert subprocess.check_output([sys.executable, "-c", _ASK], env=empty, text=True, timeout=120) == "False\n"
