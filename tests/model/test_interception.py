import contextlib
import copy

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_zb.model.interception import Interception
from lightning_zb.model.layers import find_layers
from lightning_zb.planning.placement import cyclic, wave
from tests.model.driver import Pipeline, assert_bitwise, plain_losses
from tests.model.modules import WIDTH, LanguageModel, SequentialModule, tokens, vectors


class Step(L.LightningModule):
    """A stack of blocks whose step is given as a function of (module, x)."""

    def __init__(self, body, layers=4, make=lambda: nn.Linear(WIDTH, WIDTH)):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 1)
        self.body = body

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.predict_step(batch, batch_idx), batch[1])

    def predict_step(self, batch, batch_idx):
        return self.head(self.body(self, batch[0]))


def run(self, x):
    for layer in self.layers:
        x = layer(x)
    return x


def plainly(self, x):
    return run(self, self.embed(x))


def split(body, counts=(2, 1, 1, 2), **options):
    """Run a step split over a wave; what the refusals are tested with."""
    counts = list(counts)
    return Pipeline(Step(body, **options), counts, wave(2) if len(counts) == 4 else cyclic(len(counts))).train(vectors(1))


# -- what works ----------------------------------------------------------------------------------------------------


def swallowing(self, x):
    x = self.embed(x)
    for layer in self.layers:
        try:
            x = layer(x)
        except:  # noqa: E722
            x = None
    return x


def failing_on_unwinding(self, x):
    out = None
    try:
        out = plainly(self, x)
    finally:
        out + 1
    return out


def excepting(self, x):
    try:
        return plainly(self, x)
    except Exception as error:
        raise AssertionError("the unwinding was caught") from error


def in_contexts(self, x):
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autograd.graph.save_on_cpu())
        return plainly(self, x)


def between(self, x):
    x = self.embed(x)
    for layer in self.layers:
        x = torch.tanh(layer(x)) * 0.5
    return x


def in_place(self, x):
    x = self.embed(x)
    x += 0.5
    for layer in self.layers:
        x = layer(x)
        x *= 0.5
    return x.add_(1.0)


def data_residual(self, x):
    """The input batch itself may be used anywhere: every device has it."""
    return plainly(self, x) + x


def enumerated_slice(self, x):
    x = self.embed(x)
    for i, layer in enumerate(self.layers[:4]):
        x = layer(x) * (i + 1)
    return x


@pytest.mark.parametrize("counts", [[2, 1, 1, 2], [1, 2, 2, 1], [3, 3]])
@pytest.mark.parametrize(
    "body", [swallowing, failing_on_unwinding, excepting, in_contexts, between, in_place, data_residual, enumerated_slice]
)
def test_user_code_around_the_layers(body, counts):
    assert_bitwise(Step(body), vectors(2), counts, wave(len(counts) // 2))


class Pair(nn.Module):
    """Takes and returns (hidden, residual) and a number."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state):
        hidden, residual, count = state["hidden"], state["residual"], state["count"]
        return {"hidden": torch.tanh(self.linear(hidden)), "residual": residual + hidden, "count": count + 1}


def pairs(self, x):
    state = {"hidden": self.embed(x), "residual": x, "count": 0}
    for layer in self.layers:
        state = layer(state)
    return state["hidden"] + state["residual"] / state["count"]


def test_a_nest_of_tensors_and_numbers_travels():
    assert_bitwise(Step(pairs, make=Pair), vectors(2), [2, 1, 1, 2], wave(2))


@pytest.mark.parametrize("counts", [[2, 1, 1, 2], [3, 1, 1, 1], [2, 2, 1, 1]])
def test_a_layer_twice_in_the_stack(counts):
    torch.manual_seed(0)
    module = SequentialModule(4)
    module.model[2] = module.model[1]
    assert_bitwise(module, vectors(2), counts, cyclic(1, 4))


def test_frozen_first_layers():
    module = LanguageModel(4)
    for part in (module.embed, *module.blocks[:2]):
        part.requires_grad_(False)
    module.positions.requires_grad_(False)
    assert_bitwise(module, tokens(2), [2, 2, 1, 1], wave(2))


def test_forward_hooks_of_layers_run_once_in_effect():
    module = Step(plainly)
    for layer in module.layers:
        layer.register_forward_hook(lambda layer, args, output: output * 1.5)
    assert_bitwise(module, vectors(2), [2, 1, 1, 2], wave(2))


def test_nothing_is_replaced():
    module = LanguageModel(4)
    names, kinds = list(module.state_dict()), [type(m) for m in module.modules()]
    indices = [p.shape for p in module.parameters()]
    for device in Pipeline(module, [2, 1, 1, 2], wave(2)).devices:
        assert list(device.module.state_dict()) == names
        assert [type(m) for m in device.module.modules()] == kinds
        assert [p.shape for p in device.module.parameters()] == indices


def test_outside_a_pass_the_layers_just_run():
    module = SequentialModule(4)
    x = vectors(1)[0][0][0]
    expected = module.model(x)
    interception = Interception(find_layers(module))
    assert torch.equal(module.model(x), expected)
    copied = copy.deepcopy(module)
    assert torch.equal(copied.model(x), expected)
    assert copied.model[0].forward.__self__ is copied.model[0]
    interception.remove()
    assert all("forward" not in layer.__dict__ for layer in module.model)


def test_layers_compiled_in_place():
    module = Step(plainly)
    for layer in module.layers:
        layer.register_forward_hook(lambda layer, args, output: output * 1.5)
    losses, gradients = plain_losses(module, vectors(2))
    pipeline = Pipeline(module, [2, 1, 1, 2], wave(2), prepare=lambda m: [x.compile(backend="eager") for x in m.layers])
    assert all(torch.equal(a, b) for a, b in zip(losses, pipeline.train(vectors(2)), strict=True))
    assert all(torch.equal(pipeline.gradients()[name], g) for name, g in gradients.items())


def test_a_bypass_shows_in_evaluation():
    module = Step(skipping)
    (output,) = Pipeline(module, [2, 1, 1, 2], wave(2)).evaluate(vectors(1), "predict_step")
    assert output.isnan().all()


# -- what is refused -----------------------------------------------------------------------------------------------


def never(self, x):
    return self.embed(x)


def twice(self, x):
    return run(self, plainly(self, x))


def one_layer_twice(self, x):
    x = self.embed(x)
    for i, layer in enumerate(self.layers):
        x = layer(layer(x)) if i == 3 else layer(x)
    return x


def out_of_order(self, x):
    x = self.embed(x)
    for i in (0, 2, 1, 3):
        x = self.layers[i](x)
    return x


def too_few(self, x):
    x = self.embed(x)
    for layer in self.layers[:3]:
        x = layer(x)
    return x


def skipping(self, x):
    embedded = self.embed(x)
    return run(self, embedded) + embedded


def residual_around(self, x):
    x = self.embed(x)
    for layer in self.layers:
        x = x + layer(x)
    return x


def deep_supervision(self, x):
    states = [self.embed(x)]
    for layer in self.layers:
        states.append(layer(states[-1]))
    return sum(states)


def reentrant(self, x):
    x = self.embed(x)
    for layer in self.layers:
        x = checkpoint(layer, x, use_reentrant=True)
    return x


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (never, "never reached the pipelined layers; name the stack"),
        (twice, "runs the pipelined layers twice"),
        (one_layer_twice, 'calls layer "layers.3" twice'),
        (out_of_order, 'calls layer "layers.2" where layer number 1 of the stack comes next'),
        (too_few, "called 3 of the 4 pipelined layers"),
        (skipping, "reaches the loss without passing through them"),
        (residual_around, "reaches the loss without passing through them"),
        (deep_supervision, "reaches the loss without passing through them"),
        (reentrant, "use_reentrant=False"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_one_sentence(body, message):
    with pytest.raises(RuntimeError, match=message):
        split(body)


def test_checkpointed_layer_after_a_prologue_alone_is_refused():
    with pytest.raises(RuntimeError, match=r'layer "blocks.0" runs under torch.utils.checkpoint right after'):
        Pipeline(LanguageModel(4, checkpointed=True), [1, 5], cyclic(2)).train(tokens(1))


def test_checkpointed_layer_before_an_epilogue_alone_is_refused():
    with pytest.raises(RuntimeError, match=r'layer "blocks.3" runs under torch.utils.checkpoint and ends a chunk'):
        Pipeline(LanguageModel(4, checkpointed=True), [3, 2, 1], cyclic(3)).train(tokens(1))


class Lossless(Step):
    def training_step(self, batch, batch_idx):
        return {"logits": self.body(self, batch[0])}


def test_a_step_without_a_loss_is_refused():
    with pytest.raises(TypeError, match=r'training_step returned dict; .* return a tensor or a dict with "loss"'):
        Pipeline(Lossless(plainly), [6], cyclic(1)).train(vectors(1))


def test_errors_of_the_user_pass_through():
    def broken(self, x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        split(broken)
