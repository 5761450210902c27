import pytest

from lightning_zb.planning.placement import cyclic, wave
from tests.model.driver import assert_bitwise
from tests.model.hugging_face import CausalLanguageModel, texts


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3", "mixtral", "bamba", "nemotron_h"])
def test_families_are_bitwise_on_a_wave(name, padded):
    counts = [2, 2, 1, 2] if name == "nemotron_h" else [2, 1, 1, 2]
    pipeline = assert_bitwise(CausalLanguageModel(name), texts(2, padded=padded), counts, wave(2))
    assert all(d.ownership.own_bytes < d.ownership.total_bytes for d in pipeline.devices)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_prologue_alone_and_epilogue_alone_are_bitwise(name):
    assert_bitwise(CausalLanguageModel(name), texts(2, padded=True), [1, 2, 2, 1], wave(2))


@pytest.mark.parametrize("counts", [[2, 1, 1, 2], [1, 2, 2, 1]])
def test_router_logits_ride_along(counts):
    module = CausalLanguageModel("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    assert_bitwise(module, texts(2, padded=True), counts, wave(2))


def test_gradient_checkpointing_is_bitwise():
    assert_bitwise(CausalLanguageModel("llama", checkpointing=True), texts(2), [2, 1, 1, 2], wave(2))


def test_sequential_placement_is_bitwise():
    assert_bitwise(CausalLanguageModel("llama"), texts(2), [2, 2, 2], cyclic(3))
