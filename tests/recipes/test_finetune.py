"""Fine-tuning: a folder in Hugging Face's format in, trained with the plain Trainer's bits, and a folder out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.train import train
from tests.recipes.checkpoint_folder import make_checkpoint
from tests.test_conf import composed

PIPELINE = ("trainer.devices=1", "+strategy.virtual_devices=2", "strategy.post_validation=off")


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def checkpoint(request, tmp_path_factory: pytest.TempPathFactory, topics_folder: Path) -> Path:
    text = "".join(path.read_text() for path in sorted(topics_folder.iterdir())[:5])
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), text, tie_word_embeddings=request.param)


def finetune(folder: Path, checkpoint: Path, texts: Path, *overrides: str) -> dict[str, Tensor]:
    """Fine-tune for a few steps.

    Returns:
        The weights as saved.
    """
    given = [f"checkpoint={checkpoint}", f"data.read.path={texts}", "debug=few_steps", "threads=1", *overrides]
    train(composed(folder, *given, name="finetune"))
    return load_file(folder / "finetuned" / "model.safetensors")


def assert_same_bits(weights: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[key], others[key]) for key in weights)


def test_a_pipeline_saves_what_the_plain_trainer_saves(checkpoint, topics_folder, tmp_path):
    before = load_file(checkpoint / "model.safetensors")
    plain = finetune(tmp_path / "plain", checkpoint, topics_folder, "strategy=plain")
    assert plain.keys() == before.keys()
    assert not any(torch.equal(plain[key], before[key]) for key in plain)
    assert_same_bits(finetune(tmp_path / "pipeline", checkpoint, topics_folder, *PIPELINE), plain)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "pipeline" / "finetuned").state_dict()
    assert all(torch.equal(saved[key], plain[key]) for key in plain)
    text = "The try statement"
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (checkpoint, tmp_path / "pipeline" / "finetuned")]
    assert len({tuple(tokenizer(text)["input_ids"]) for tokenizer in tokenizers}) == 1


@pytest.mark.parametrize("checkpoint", [True], indirect=True, ids=["tied"])
def test_a_pipeline_resumes_as_the_plain_trainer_resumes(checkpoint, topics_folder, tmp_path):
    every = "+callbacks.checkpoint.save_top_k=-1"
    whole = finetune(tmp_path / "whole", checkpoint, topics_folder, "strategy=plain", every)
    half = tmp_path / "whole" / "checkpoints" / "epoch=0-step=2.ckpt"
    assert half.exists()
    resume = f'resume="{half}"'
    plain = finetune(tmp_path / "plain", checkpoint, topics_folder, "strategy=plain", resume)
    assert_same_bits(finetune(tmp_path / "pipeline", checkpoint, topics_folder, *PIPELINE, resume), plain)
    assert not any(torch.equal(plain[key], whole[key]) for key in plain)  # Lightning begins the epoch's data anew


def test_a_folder_without_a_model_is_named(topics_folder, tmp_path):
    config = composed(tmp_path, f"checkpoint={topics_folder}", f"data.read.path={topics_folder}", name="finetune")
    with pytest.raises(Exception, match=r"has no config\.json; give the folder of a model"):
        train(config)
