"""The split backward against plain autograd: the same bits, however weights are used and whatever is done between passes."""

import functools

import pytest
import torch
import torch._inductor.decomposition  # compiling imports it, which fails in torch 2.13 after other tests were collected
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_zb.execution import entry_points
from lightning_zb.execution.split_backward import DeferredWeights, accumulate
from tests.execution.split_comparison import Holder, assert_same_bits, deferred_parameters, on_random, weigh


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_weights_used_twice_and_tied(autocast, nested):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 16)
            self.inner = nn.Linear(16, 16)

        def forward(self, ids):
            x = self.embed(ids)
            for _ in range(3):
                x = self.inner(torch.tanh(x))
            if nested and autocast:  # a context within a context keeps its casts
                with torch.autocast("cpu", torch.bfloat16):
                    x = self.inner(x)
            return F.linear(x, self.embed.weight)

    assert_same_bits(Tied(), lambda m: (weigh(m(torch.randint(0, 20, (3, 5)))), None), autocast=autocast)


def test_casts_end_with_their_autocast_context():
    def function(module, x):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                x = F.linear(F.linear(x.sin(), module.w), module.w)
        return x

    assert_same_bits(Holder(function, w=(6, 6)), on_random((7, 6)))


def test_parameter_partly_left_in_backward():
    module = Holder(lambda m, x: F.linear(x, m.w).tanh() + m.w * x, w=(8, 8))
    fired = []
    module.w.register_hook(lambda g: fired.append("tensor"))
    module.w.register_post_accumulate_grad_hook(lambda p: fired.append("accumulated"))
    assert_same_bits(module, on_random((8, 8)))
    assert fired == ["tensor", "accumulated"] * 6  # plain and split, three microbatches


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.linear(x, m.w * m.s) + (m.w * m.s).sum(),
        lambda m, x: (lambda w: F.linear(x, w) + w.sum())(m.w * m.s),
        lambda m, x: (lambda w: F.linear(x, w) + w.t() * w.sum())(m.w.exp().t()),
        lambda m, x: (lambda w: F.linear(x, w * m.s) + w.sum())(m.w.exp()),
        lambda m, x: (lambda w: F.linear(x, w[torch.tensor([1, 0, 2, 3])]) + w.exp().sum())(m.w),
    ],
)
def test_derived_weight_also_used_in_backward(function):
    module = Holder(function, w=(4, 4), s=(4, 1))
    plain, split = {}, {}
    for gradients in (plain, split):
        module.zero_grad()
        x = torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()
        record = DeferredWeights()
        if gradients is plain:
            module(x).sin().sum().backward()
        else:
            with record.recording():
                loss = module(x).sin().sum()
            with record.recording():
                loss.backward()
            assert module.w.grad is None
            accumulate(record.contributions())
        gradients |= {name: p.grad for name, p in module.named_parameters() if p.grad is not None} | {"x": x.grad}
    assert plain.keys() == split.keys()
    for name, gradient in plain.items():  # more than two terms may be added in another order here
        torch.testing.assert_close(split[name], gradient, rtol=1e-6, atol=1e-6)


def test_frozen_and_unused_parameters():
    module = nn.ModuleDict({"used": nn.Linear(6, 6), "frozen": nn.Linear(6, 6), "unused": nn.Linear(6, 6)})
    module["frozen"].requires_grad_(False)
    module["used"].bias.requires_grad_(False)
    x = torch.randn(5, 6, requires_grad=True)
    assert_same_bits(module, lambda m: (weigh(m["used"](m["frozen"](x).sin())), None))
    assert deferred_parameters(module, lambda m: (weigh(m["used"](m["frozen"](x).sin())), None)) == {"used.weight"}


def test_frozen_weight_with_trained_bias_and_frozen_input():
    module = nn.Linear(6, 6)
    module.weight.requires_grad_(False)
    assert_same_bits(module, on_random((5, 6), needs_gradient=False), allowed=("linear",))


def test_output_of_parameters_only():
    module = Holder(lambda m, x: x + (m.a @ m.b) + F.linear(m.a, m.b), a=(5, 5), b=(5, 5))
    records = assert_same_bits(module, on_random((5, 5)), allowed=("matmul", "linear"))
    assert records[0].kept == {"matmul": 1}  # linear takes the other parameter as its input


class Both(torch.autograd.Function):
    """A custom function with both gradients."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return g @ weight.t(), x.t() @ g


def test_custom_function_stays_whole_and_is_counted():
    module = Holder(lambda m, x: F.linear(Both.apply(x, m.w), m.v), w=(6, 6), v=(6, 6))
    records = assert_same_bits(module, on_random((5, 6)), allowed=("Both",))
    assert records[0].kept == {"Both": 1}
    assert deferred_parameters(module, on_random((5, 6))) == {"v"}


def test_code_that_took_the_function_before_is_whole_in_backward():
    linear = torch._C._nn.linear
    module = Holder(lambda m, x: linear(x, m.w), w=(6, 6))
    assert_same_bits(module, on_random((5, 6)))
    assert deferred_parameters(module, on_random((5, 6))) == set()


def test_reentrant_checkpoint():
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def run(module):
        x = torch.randn(5, 6, requires_grad=True)
        return weigh(checkpoint(module, x, use_reentrant=True)), x

    assert_same_bits(module, run)


def test_batched_functions_of_functorch_stay_whole():
    module = Holder(lambda m, x: torch.vmap(lambda row: F.linear(row, m.w))(x), w=(6, 6))
    assert_same_bits(module, on_random((5, 6)), allowed=("linear",))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_layer_is_whole_in_backward(backend):
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    compiled = torch.compile(module[0], backend=backend)

    def forward(m):
        x = torch.randn(5, 6, requires_grad=True)
        return weigh(m[1](compiled(x).sin())), x

    assert_same_bits(module, forward, allowed=("CompiledFunction",))
    assert {"1.weight", "1.bias"} <= deferred_parameters(module, forward)


def test_hooks_fire_once_with_the_whole_gradient():
    module = nn.Linear(6, 6)
    seen = []
    module.weight.register_hook(lambda g: seen.append(g.clone()))
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    x = torch.randn(5, 6)
    record = DeferredWeights()
    with record.recording():
        loss = module(module(x)).sum()
    with record.recording():
        loss.backward()
    assert not seen
    accumulate(record.contributions())
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], module.weight.grad)


def test_tensor_hook_changes_the_gradient():
    module = nn.Linear(6, 6)
    module.weight.register_hook(lambda g: g * 0.5)
    assert_same_bits(module, on_random((5, 6)))


@pytest.mark.parametrize("what", ["weight", "input"])
def test_change_between_b_and_w_raises(what):
    module = nn.Linear(6, 6)
    x = torch.randn(5, 6)
    record = DeferredWeights()
    with record.recording():
        loss = module(x).sum()
    with record.recording():
        loss.backward()
    with torch.no_grad():
        (module.weight if what == "weight" else x).mul_(2.0)
    with pytest.raises(RuntimeError, match="changed in place between B and W"):
        record.contributions()


def test_change_between_f_and_b_raises():
    module = nn.Linear(6, 6)
    record = DeferredWeights()
    with record.recording():
        loss = module(torch.randn(5, 6, requires_grad=True)).sum()
    with torch.no_grad():
        module.weight.mul_(2.0)
    with record.recording(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradient_inside_the_forward_raises():
    module = nn.Linear(6, 6)
    record = DeferredWeights()
    x = torch.randn(5, 6, requires_grad=True)
    with record.recording(), pytest.raises(RuntimeError, match="does not split the backward"):
        torch.autograd.grad(module(x).sum(), x, create_graph=True)


def test_record_is_empty_after_w_and_counts_what_it_holds():
    module = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    record = DeferredWeights()
    with record.recording():
        loss = module(torch.randn(4, 16)).sin().sum()
    assert record.stash_bytes() == 0
    with record.recording():
        loss.backward()
    held = [4 * 16, 4 * 32, 4 * 32, 4 * 8]  # two inputs and two output gradients of four rows
    assert record.stash_bytes() == 4 * sum(held)
    assert len(record.contributions()) == 4
    assert record.stash_bytes() == 0
    assert record.contributions() == {}


def test_gradients_share_no_memory():
    module = Holder(lambda m, x: F.linear(x, m.w + m.v) + m.a + m.b, w=(6, 6), v=(6, 6), a=(5, 6), b=(5, 6))
    assert_same_bits(module, on_random((5, 6)))
    pointers = [p.grad.data_ptr() for p in module.parameters()]
    assert len(set(pointers)) == len(pointers)


def test_nothing_is_wrapped_after_uninstalling():
    entry_points.uninstall()
    before = F.linear, torch.matmul, torch.Tensor.__matmul__, torch.autograd.Function.apply
    with DeferredWeights().recording():
        assert F.linear is not before[0]
    entry_points.uninstall()
    assert (F.linear, torch.matmul, torch.Tensor.__matmul__, torch.autograd.Function.apply) == before
    assert "__matmul__" not in vars(torch.Tensor)


def test_wrapped_functions_pass_through_without_a_record():
    with DeferredWeights().recording():
        pass
    assert type(F.linear(torch.randn(2, 3), nn.Parameter(torch.randn(4, 3))).grad_fn).__name__ != "LinearBackward"
    assert functools.reduce(torch.matmul, [torch.eye(2)] * 3).equal(torch.eye(2))
