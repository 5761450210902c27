"""Floor 1 stands alone: planning imports neither torch nor lightning nor a floor above it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import lightning_zb.planning

ROOT = Path(lightning_zb.planning.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports(path):
    for name in imported(path):
        top = name.split(".")[0]
        assert top not in ("torch", "lightning", "lightning_fabric", "pytorch_lightning", "transformers", "matplotlib"), name
        assert top != "lightning_zb" or name.startswith("lightning_zb.planning."), name
