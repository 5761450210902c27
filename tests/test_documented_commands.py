"""Every command of README.md and recipes/README.md runs as it is written, from a clean checkout, with tiny limits."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from lightning_zb.planning.costs import CostModel, LayerCost, LayerRole
from lightning_zb.planning.planfile import write_costs
from tests.recipes.checkpoint_folder import make_checkpoint
from tests.recipes.leftovers import all_end
from tests.recipes.test_summary import SUMMARY
from tests.recipes.test_sweep import leave_job

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "recipes/README.md")
TIME_LIMIT = 900
FEW_STEPS = "debug=few_steps threads=1"

LIMITS: dict[str, str | None] = {
    "make train": f"VENV={{venv}} ARGS='{FEW_STEPS} compare=null'",
    "make test": "VENV={venv} ARGS=tests/recipes/test_summary.py",
    "python recipes/train.py": FEW_STEPS,
    "python recipes/train.py -m search=optuna": f"{FEW_STEPS} hydra.sweeper.n_trials=1",
    "python recipes/finetune.py": FEW_STEPS,
    "python recipes/plan.py": "effort=1",
    "python -m recipes.costs": "",
    "python -m recipes.summary": "",
    "python -m recipes.sweep": "",
    "torchrun --standalone --nproc-per-node=2 recipes/train.py": FEW_STEPS,
    "lightning-zb compare": "",
    "lightning-zb profile": "--steps 2",
    "pip install": None,  # would change the environment of the tests
}
"""What a command gets appended, by its beginning; None: it is not run. A command that begins otherwise is an error."""


MODEL = """
from tests.lightning.models import SequentialModule


class Model(SequentialModule):
    def __init__(self, depth):
        super().__init__(num_blocks=depth)
"""


@dataclass(frozen=True)
class Checkout:
    """A copy of the tracked files, with what the documents' commands name."""

    folder: Path
    environment: dict[str, str]
    venv: Path


def documented_commands() -> list[str]:
    """The commands of all shell blocks, and of the prompts in transcripts, without comments."""
    commands = []
    for document in DOCUMENTS:
        language: str | None = None
        for line in (ROOT / document).read_text().splitlines():
            if line.startswith("```"):
                language = line[3:] if language is None else None
            elif language == "bash" or (language == "" and line.startswith("$ ")):
                commands.append(line.removeprefix("$ ").split(" #")[0].strip())
    return [command for command in dict.fromkeys(commands) if command]


def limit_of(command: str) -> str | None:
    """What the longest known beginning of a command gets appended.

    Raises:
        KeyError: none is known.
    """
    known = [beginning for beginning in LIMITS if f"{command} ".startswith(f"{beginning} ")]
    if not known:
        raise KeyError(f"{command!r} is documented, but LIMITS in {Path(__file__).name} does not say how to run it briefly")
    return LIMITS[max(known, key=len)]


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    folder = tmp_path_factory.mktemp("checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    _make_inputs(folder)
    # For make: an environment that is installed already.
    venv = tmp_path_factory.mktemp("venv")
    (venv / "bin").mkdir()
    (venv / "bin" / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (venv / "bin" / "python").chmod(0o755)
    (venv / ".installed").touch()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return Checkout(folder, environment, venv)


def _make_inputs(folder: Path) -> None:
    texts = folder / "path" / "to" / "texts"
    texts.mkdir(parents=True)
    for name, text in topics.items():
        (texts / f"{name}.txt").write_text(text)
    make_checkpoint(folder / "path" / "to" / "checkpoint", "".join(topics.values())[:50_000])
    layers = [LayerCost(f"layer {i}", 1e-3, 1e-3, 1e-3, activation_bytes=1e6, output_bytes=1e4) for i in range(16)]
    ends = [LayerCost(role.value, 1e-4, 1e-4, 1e-4, role=role) for role in (LayerRole.PROLOGUE, LayerRole.EPILOGUE)]
    for name in ("size1.json", "size2.json", "path/to/costs.json"):
        write_costs(CostModel((ends[0], *layers, ends[1])), folder / name)
    package = folder / "mypackage"
    package.mkdir()
    (package / "models.py").write_text(MODEL)
    (package / "data.py").write_text("import torch\n\n\ndef one_batch():\n    return torch.randn(4, 8), torch.randn(4, 1)\n")
    SUMMARY.write(folder / "outputs" / "earlier")
    leave_job(folder / "multirun" / "DATE" / "TIME" / "0", ["strategy.memory_budget=1.5"], SUMMARY)


def test_documents_have_commands_and_every_command_is_known():
    commands = documented_commands()
    assert "make train" in commands
    assert sum("recipes/train.py" in command for command in commands) > 8
    for command in commands:
        limit_of(command)
    with pytest.raises(KeyError, match="does not say how"):
        limit_of("python recipes/trainer.py")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("command", [command for command in documented_commands() if limit_of(command) is not None], ids=str)
def test_documented_command_runs(command, checkout):
    if "search=optuna" in command:
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="extra optuna")
    limited = f"{command} {(limit_of(command) or '').format(venv=checkout.venv)}"
    result = subprocess.run(
        ["timeout", "-k", "1", str(TIME_LIMIT), "bash", "-c", limited],
        cwd=checkout.folder,
        env=checkout.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    assert result.stdout.strip()
    assert all_end(str(checkout.folder))
