"""Floor 2 runs what floor 3 offers: schedules with a split backward on LightningModules, all devices in one process."""

import copy

import pytest
import torch

from lightning_zb.execution.lowering import lower, lower_forward
from lightning_zb.execution.offline import offline_executors, run_offline
from lightning_zb.planning.placement import cyclic, wave
from tests.execution.pipeline_models import greedy
from tests.model.driver import Pipeline, plain_losses
from tests.model.hugging_face import CausalLanguageModel, texts
from tests.model.modules import LanguageModel, SequentialModule, tokens, vectors
from tests.model.test_interception import Step, skipping

CASES = {
    "sequential": (lambda: SequentialModule(4), vectors),
    "language": (lambda: LanguageModel(4), tokens),
    "tied": (lambda: LanguageModel(4, tied=True), tokens),
    "checkpointed": (lambda: LanguageModel(4, checkpointed=True), tokens),
    "nemotron_h": (lambda: CausalLanguageModel("nemotron_h"), texts),
    "mixtral": (lambda: CausalLanguageModel("mixtral", output_router_logits=True, router_aux_loss_coef=0.5), texts),
    "bamba": (lambda: CausalLanguageModel("bamba"), texts),
    "llama": (lambda: CausalLanguageModel("llama", checkpointing=True), texts),
    "gpt2": (lambda: CausalLanguageModel("gpt2"), texts),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_a_split_backward_is_bitwise(case, precision):
    torch.manual_seed(0)
    make, batches = CASES[case]
    module, microbatches = make(), batches(5)
    counts = [2, 2, 1, 2] if case == "nemotron_h" else [2, 1, 1, 2]

    def autocast():
        return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")

    losses, gradients = plain_losses(module, microbatches, context=autocast)
    pipeline = Pipeline(module, counts, wave(2))
    runners = [device.runner for device in pipeline.devices]
    for runner in runners:
        runner.begin(microbatches, step=0, divisor=len(microbatches), context=autocast)
    run_offline(lower(greedy(pipeline.placement, len(microbatches)), pipeline.placement), offline_executors(runners))
    assert all(torch.equal(loss, runners[0].losses[j]) for j, loss in enumerate(losses))
    found = {n: p.grad for d in pipeline.devices for n, p in d.module.named_parameters() if p.grad is not None}
    assert found.keys() == gradients.keys()
    different = [name for name in gradients if not torch.equal(gradients[name], found[name])]
    assert not different


def test_a_bypass_is_noticed_by_a_split_backward():
    pipeline = Pipeline(Step(skipping), [2, 1, 1, 2], wave(2))
    runners = [device.runner for device in pipeline.devices]
    for runner in runners:
        runner.begin(vectors(2), step=0)
    with pytest.raises(RuntimeError, match="reaches the loss without passing through them"):
        run_offline(lower(greedy(wave(2), 2), wave(2)), offline_executors(runners))


@pytest.mark.parametrize("placement", [wave(2), cyclic(4)])
def test_predictions(placement):
    torch.manual_seed(0)
    module = SequentialModule(4)
    pipeline = Pipeline(module, [2, 1, 1, 2], placement)
    runners = [device.runner for device in pipeline.devices]
    with torch.inference_mode():
        for runner in runners:
            runner.begin(vectors(2), step=0, method="predict_step", divisor=None)
        results = run_offline(lower_forward(placement, 2), offline_executors(runners))
        plain = [copy.deepcopy(module).predict_step(*args) for args in vectors(2)]
    assert all(torch.equal(a, b) for a, b in zip(plain, results, strict=True))
