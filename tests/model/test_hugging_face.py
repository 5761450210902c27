import pytest

from lightning_zb.planning.placement import cyclic, wave
from tests.model.driver import Pipeline, assert_bitwise
from tests.model.hugging_face import CausalLanguageModel, texts

FAMILIES = [
    "gpt2",
    "llama",
    "gemma3",
    "mixtral",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "mamba",
    "mamba2",
    "jamba",
    "nemotron_h",
    "bamba",
    "granitemoehybrid",
    "falcon_h1",
]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_bitwise_on_a_wave(name, padded):
    counts = [2, 2, 1, 2] if name == "nemotron_h" else [2, 1, 1, 2]
    pipeline = assert_bitwise(CausalLanguageModel(name), texts(2, padded=padded), counts, wave(2))
    assert all(d.ownership.own_bytes < d.ownership.total_bytes for d in pipeline.devices)


def test_zamba2_is_refused():
    with pytest.raises(RuntimeError, match="reaches the loss without passing through them"):
        Pipeline(CausalLanguageModel("zamba2"), [2, 1, 1, 2]).train(texts(1))


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_prologue_alone_and_epilogue_alone_are_bitwise(name):
    assert_bitwise(CausalLanguageModel(name), texts(2, padded=True), [1, 2, 2, 1], wave(2))


def test_gradient_checkpointing_is_bitwise():
    assert_bitwise(CausalLanguageModel("llama", checkpointing=True), texts(2), [2, 1, 1, 2], wave(2))


def test_sequential_placement_is_bitwise():
    assert_bitwise(CausalLanguageModel("llama"), texts(2), [2, 2, 2], cyclic(3))
