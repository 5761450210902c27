import random

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lightning_zb.model.randomness import RandomStreams
from lightning_zb.planning.placement import cyclic, wave
from tests.model.driver import Pipeline
from tests.model.modules import LanguageModel, tokens


class NoisyModel(LanguageModel):
    """Draws in the step before and after the layers, and in the layers, one of which may stand twice in the stack."""

    def __init__(self, *args, shared=False, **options):
        super().__init__(*args, **options)
        if shared:
            self.blocks[2] = self.blocks[1]

    def training_step(self, batch, batch_idx):
        mask = torch.rand(batch.shape) < 0.2 + 0.1 * random.random() + 0.1 * np.random.rand()
        x = self.embed(batch.masked_fill(mask, 0))
        logits = self.head(F.dropout(self.norm(self.run_blocks(x)), 0.3))
        return F.cross_entropy(logits.flatten(0, 1), batch.flatten())


def results(counts, placement, seed=7, step=3, **options):
    torch.manual_seed(0)
    pipeline = Pipeline(NoisyModel(4, dropout=0.5, **options), counts, placement, seed=seed)
    return pipeline.train(tokens(2), step), pipeline.gradients()


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True)) and all(torch.equal(a[1][n], b[1][n]) for n in a[1])


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("counts", [[3, 3], [2, 1, 1, 2], [2, 2, 2]])
@pytest.mark.parametrize("shared", [False, True])
def test_every_cut_draws_the_same(counts, checkpointed, shared):
    one = results([6], cyclic(1), checkpointed=checkpointed, shared=shared)
    placement = cyclic(1, len(counts)) if shared else cyclic(len(counts))
    assert same(one, results(counts, placement, checkpointed=checkpointed, shared=shared))


@pytest.mark.parametrize("shared", [False, True])
def test_recomputation_draws_the_same(shared):
    assert same(results([6], cyclic(1), shared=shared), results([6], cyclic(1), checkpointed=True, shared=shared))


def test_seed_step_and_microbatch_matter():
    one = results([6], cyclic(1))
    assert not same(one, results([6], cyclic(1), seed=8))
    assert not same(one, results([6], cyclic(1), step=4))
    streams = RandomStreams(1)
    drawn = []
    for step in range(3):
        for microbatch in range(3):
            with streams.microbatch(step, microbatch):
                drawn.append(float(torch.rand(())))
                for layer in range(3):
                    outside = streams.enter_layer(layer)
                    drawn.append(float(torch.rand(())))
                    streams.leave_layer(layer, outside)
    assert len(set(drawn)) == len(drawn)


def test_generators_are_left_as_found():
    def draw():
        return float(torch.rand(())), random.random(), np.random.rand()

    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    expected = [draw(), draw()]
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    first = draw()
    results([2, 1, 1, 2], wave(2), checkpointed=True)
    torch.manual_seed(5)  # `results` seeds torch itself
    torch.rand(())
    assert [first, draw()] == expected


def test_a_whole_step_leaves_generators_as_found():
    streams = RandomStreams(1)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    np.random.randn()  # leaves half a pair behind
    with streams.preserved():
        for microbatch in range(2):
            with streams.microbatch(0, microbatch):
                drawn = (float(torch.rand(())), random.random(), np.random.randn())
    found = (float(torch.rand(())), random.random(), np.random.randn())
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    np.random.randn()
    assert found == (float(torch.rand(())), random.random(), np.random.randn())
    assert drawn != found


def test_a_layer_outside_any_stream_draws_from_the_global_generator():
    streams = RandomStreams(1)
    torch.manual_seed(3)
    with streams.replayed_layer(0):
        a = torch.rand(2)
    with streams.replayed_layer(0):
        b = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(torch.cat([a, b]), torch.rand(4))


def test_mean_of_masks_is_right():
    streams, means = RandomStreams(0), []
    with streams.microbatch(0, 0):
        for layer in range(400):
            outside = streams.enter_layer(layer)
            means.append(torch.rand(16).mean())
            streams.leave_layer(layer, outside)
    assert abs(float(torch.stack(means).mean()) - 0.5) < 0.02
