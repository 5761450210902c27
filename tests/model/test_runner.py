import copy

import pytest
import torch

from lightning_zb.planning.placement import cyclic, wave
from tests.model.driver import Pipeline, assert_bitwise
from tests.model.modules import LanguageModel, SequentialModule, tokens, vectors


@pytest.mark.parametrize("counts", [[6], [3, 3], [2, 1, 2, 1], [1, 1, 1, 1, 1, 1], [1, 5], [5, 1]])
def test_sequential_is_bitwise(counts):
    torch.manual_seed(0)
    pipeline = assert_bitwise(SequentialModule(4), vectors(3), counts, cyclic(len(counts)))
    total = pipeline.devices[0].ownership.total_bytes
    assert sum(d.ownership.own_bytes for d in pipeline.devices) == total


@pytest.mark.parametrize("counts", [[6], [2, 2, 1, 1], [1, 2, 2, 1], [2, 1, 1, 2]])
@pytest.mark.parametrize("tied", [False, True])
def test_language_model_is_bitwise_on_a_wave(counts, tied):
    torch.manual_seed(0)
    placement = wave(2) if len(counts) == 4 else cyclic(1)
    pipeline = assert_bitwise(LanguageModel(4, tied=tied), tokens(3), counts, placement)
    if len(counts) == 4:
        shared = pipeline.devices[0].runner.shared_parameters()
        assert [chunks for chunks in shared.values()] == ([(0, 3)] if tied else [])
        assert all(d.ownership.own_bytes < d.ownership.total_bytes for d in pipeline.devices)
        assert pipeline.devices[1].module.embed.weight.is_meta
        assert not pipeline.devices[1].module.positions.is_meta
        assert pipeline.devices[1].module.positions.untyped_storage().nbytes() == 4


@pytest.mark.parametrize("counts", [[2, 2, 2], [1, 2, 2, 1], [1, 4, 1]])
def test_language_model_is_bitwise_on_a_sequential_placement(counts):
    torch.manual_seed(0)
    assert_bitwise(LanguageModel(4), tokens(2), counts, cyclic(len(counts)))


@pytest.mark.parametrize("counts", [[3, 3], [2, 1, 1, 2]])
def test_layers_under_checkpoint_are_bitwise(counts):
    torch.manual_seed(0)
    assert_bitwise(LanguageModel(4, checkpointed=True), tokens(2), counts, cyclic(len(counts)))


def test_predictions_are_bitwise():
    torch.manual_seed(0)
    module = SequentialModule(4)
    batches = vectors(2)
    split = Pipeline(module, [2, 1, 1, 2], wave(2)).evaluate(batches, "predict_step")
    with torch.inference_mode():
        plain = [copy.deepcopy(module).predict_step(*args) for args in batches]
    assert all(torch.equal(a, b) for a, b in zip(plain, split, strict=True))
