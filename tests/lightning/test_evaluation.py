"""Validation, test and prediction: the plain Trainer's numbers, files and return values, on every rank."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks

from lightning_zb import ZeroBubbleStrategy
from tests.lightning import evaluation_worker
from tests.lightning.models import TokenModule, Tokens
from tests.lightning.processes import run_ranks

CASES = ["metrics:zb-v", "metrics:1f1b", "intervals:zb-v", "stopped:1f1b", "plateau:zb-v", "fast:zb-v", "timed:zb-v"]


@pytest.mark.distributed
def test_every_rank_sees_what_the_plain_trainer_returns(tmp_path: Path):
    arguments = [str(tmp_path), ",".join(CASES)]
    codes, outputs = run_ranks("tests.lightning.evaluation_worker", arguments, 2, tmp_path, seconds=240)
    assert codes == [0, 0], "\n".join(o[-3000:] for o in outputs)
    for case in CASES:
        plain = evaluation_worker.run(case.split(":")[0], 1, None, tmp_path / "plain" / case)
        for rank in range(2):
            seen = torch.load(tmp_path / f"{case}.{rank}.pt", weights_only=False)
            for key, expected in plain.items():
                if key == "files" and rank > 0:
                    continue
                if key == "predict":
                    assert [t.tolist() for t in seen[key]] == [t.tolist() for t in expected], (case, rank, key)
                else:
                    assert seen[key] == expected, (case, rank, key)
    assert "agree on it after every step" in outputs[0]
    assert "on_train_epoch_end was passed over on rank 1" in outputs[1]


@pytest.mark.parametrize("name", ["WeightAveraging", "EMAWeightAveraging", "StochasticWeightAveraging"])
def test_averaged_weights_are_refused_in_one_sentence(name: str):
    kind = getattr(callbacks, name, None)
    if kind is None:
        pytest.skip(f"this Lightning has no {name}")
    callback = kind(swa_lrs=1e-2) if name == "StochasticWeightAveraging" else kind()
    trainer = L.Trainer(
        strategy=ZeroBubbleStrategy(virtual_devices=2), accelerator="cpu", devices=1, callbacks=[callback],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"^{name} copies the whole model .* average checkpoints afterwards"):
        trainer.fit(TokenModule(), torch.utils.data.DataLoader(Tokens(8), batch_size=2))
