import copy
from dataclasses import dataclass
from types import SimpleNamespace

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


class LoggingModel(LanguageModel):
    """Logs before and after the layers."""

    def training_step(self, batch, batch_idx):
        self.log("before", 1.0)
        result = super().training_step(batch, batch_idx)
        self.log_dict({"loss": result["loss"]})
        return result


def test_only_the_last_chunk_logs_and_with_its_own_batch():
    pipeline = Pipeline(LoggingModel(4), [2, 1, 1, 2], wave(2))
    logged = []
    for number, device in enumerate(pipeline.devices):
        results = SimpleNamespace(batch=None, batch_size=99)
        device.module._trainer = SimpleNamespace(_results=results)

        def log(name, value, number=number, results=results):
            assert results.batch_size is None
            logged.append((number, name, results.batch))

        device.module.__dict__["log"] = log
        device.module.__dict__["log_dict"] = lambda values, log=log: [log(*item) for item in values.items()]
    batches = tokens(2)
    pipeline.train(batches)
    assert [(number, name) for number, name, _ in logged] == [(0, "before"), (0, "loss")] * 2
    assert [batch is batches[i // 2][0] for i, (*_, batch) in enumerate(logged)] == [True] * 4
    assert all(device.module.__dict__["log"].__name__ == "log" for device in pipeline.devices)


def test_losses_are_undivided_and_only_the_last_output_is_kept():
    torch.manual_seed(0)
    pipeline = Pipeline(LanguageModel(2), [2, 2], wave(1, 2))
    losses = pipeline.train(tokens(3), divisor=8)
    runner = pipeline.devices[0].runner
    assert list(runner.outputs) == [2]
    assert torch.equal(runner.outputs[2]["loss"], losses[2])
    assert not runner.outputs[2]["logits"].requires_grad
    exact = Pipeline(LanguageModel(2), [4], cyclic(1))
    exact.devices[0].module.load_state_dict(pipeline.devices[0].module.state_dict())
    exact.train(tokens(3), divisor=1)
    for name, gradient in exact.gradients().items():
        torch.testing.assert_close(pipeline.gradients()[name] * 8, gradient)


@dataclass
class Batch:
    x: torch.Tensor
    rest: dict


class Custom:
    def __init__(self):
        self.ids = torch.zeros(2, 3, dtype=torch.int64)


def test_signature_sees_tensors_wherever_they_are():
    runner = Pipeline(LanguageModel(2), [4], cyclic(1)).devices[0].runner
    runner.begin([(Batch(torch.zeros(2), {"a": [torch.ones(1), "text"]}), 0), (Custom(), 1), (torch.zeros(2), 2)], step=0)
    assert runner.signature(0) == ("training_step", (((2,), torch.float32), ((1,), torch.float32)))
    assert runner.signature(1) == ("training_step", (((2, 3), torch.int64),))
    assert runner.signature(2) != runner.signature(0)


def test_a_prologue_of_several_modules_is_stood_in_for():
    """A convolutional patch embedding whose parent reshapes."""

    class Patches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv1d(1, 8, 2, 2)
            self.scale = torch.nn.Parameter(torch.ones(8))

        def forward(self, x, *, flip=False):
            x = self.conv(x[:, None]).transpose(1, 2) * self.scale
            return {"tokens": x.flip(1) if flip else x, "length": x.shape[1]}

    class Vision(LanguageModel):
        def __init__(self):
            super().__init__(4)
            self.patches = Patches()

        def training_step(self, batch, batch_idx):
            found = self.patches(batch.float(), flip=True)
            assert found["length"] == 2
            assert found["tokens"].dtype == torch.float32
            return self.head(self.norm(self.run_blocks(found["tokens"]))).square().mean()

    torch.manual_seed(0)
    pipeline = assert_bitwise(Vision(), tokens(2), [1, 2, 2, 1], wave(2))
    assert pipeline.devices[1].module.patches.conv.weight.is_meta
