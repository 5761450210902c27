"""The split backward against plain autograd: the same bits, whatever the operator, layout, precision or use of the weights."""

import functools

import pytest
import torch
import torch._inductor.decomposition  # compiling imports it, which fails in torch 2.13 after other tests were collected
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_zb.execution import entry_points
from lightning_zb.execution.split_backward import DeferredWeights, accumulate
from tests.execution.split_comparison import assert_same_bits, weigh


class Holder(nn.Module):
    """A module with parameters of these shapes, and a function of itself and of its input."""

    def __init__(self, function, dtype=torch.float32, **shapes):
        super().__init__()
        torch.manual_seed(0)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape).to(dtype)))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def layout(shape, strided):
    if strided and len(shape) > 1:
        shape = (shape[1], shape[0], *shape[2:])
        return torch.randn(shape).transpose(0, 1)
    return torch.randn(shape)


def on_random(shape, strided=False, dtype=torch.float32, needs_gradient=True):
    def run(module):
        x = layout(shape, strided).to(dtype).requires_grad_(needs_gradient)
        return weigh(module(x)), x

    return run


def deferred_parameters(module, run):
    """The parameters whose gradients W computes."""
    record = DeferredWeights()
    with record.recording():
        loss, _ = run(module)
    with record.recording():
        loss.backward()
    deferred = set(record.contributions())
    return {name for name, p in module.named_parameters() if p in deferred}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("strided", [True, False])
@pytest.mark.parametrize("shape", [(12,), (7, 12), (5, 7, 12), (2, 5, 7, 12), (1, 12), (4, 1, 12), (12, 12), (0, 12)])
def test_linear(shape, strided, bias, dtype):
    module = nn.Linear(12, 9, bias=bias).to(dtype)
    run = on_random(shape, strided, dtype)
    assert_same_bits(module, run)
    assert deferred_parameters(module, run) == {name for name, _ in module.named_parameters()}


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    num_inputs=st.integers(1, 9),
    num_outputs=st.integers(1, 9),
    order=st.permutations(range(5)),
    bias=st.booleans(),
    transposed_weight=st.booleans(),
)
def test_linear_of_any_layout(sizes, num_inputs, num_outputs, order, bias, transposed_weight):
    shape = (*sizes, num_inputs)
    order = [axis for axis in order if axis < len(shape)]
    weight_shape = (num_inputs, num_outputs) if transposed_weight else (num_outputs, num_inputs)

    def function(module, x):
        return F.linear(x, module.weight.t() if transposed_weight else module.weight, module.bias if bias else None)

    def run(module):
        stored = torch.randn([shape[axis] for axis in order])
        x = stored.permute([order.index(axis) for axis in range(len(shape))]).requires_grad_()
        return weigh(module(x)), x

    assert_same_bits(Holder(function, weight=weight_shape, bias=(num_outputs,)), run, num_microbatches=2)


PRODUCTS = {
    "x @ w": ((7, 6), {"w": (6, 5)}, lambda m, x: x @ m.w),
    "w @ x": ((6, 7), {"w": (5, 6)}, lambda m, x: m.w @ x),
    "matmul, batch": ((3, 7, 6), {"w": (6, 5)}, lambda m, x: torch.matmul(x, m.w)),
    "matmul, batch, weight left": ((3, 6, 7), {"w": (5, 6)}, lambda m, x: m.w.matmul(x)),
    "matmul, two batches, weight left": ((2, 3, 6, 7), {"w": (5, 6)}, lambda m, x: torch.matmul(m.w, x)),
    "matmul, vector": ((6,), {"w": (6, 5)}, lambda m, x: x @ m.w),
    "matmul, weight vector": ((3, 7, 6), {"w": (6,)}, lambda m, x: x @ m.w),
    "matmul, broadcast batch": ((2, 3, 7, 6), {"w": (3, 6, 5)}, lambda m, x: x @ m.w),
    "matmul, batch of weights": ((3, 7, 6), {"w": (3, 6, 5)}, lambda m, x: x @ m.w),
    "transposed weight": ((7, 6), {"w": (5, 6)}, lambda m, x: x @ m.w.t()),
    "mm": ((7, 6), {"w": (6, 5)}, lambda m, x: torch.mm(x, m.w)),
    "mv": ((6,), {"w": (5, 6)}, lambda m, x: torch.mv(m.w, x)),
    "bmm": ((3, 7, 6), {"w": (3, 6, 5)}, lambda m, x: torch.bmm(x, m.w)),
    "bmm, weight left": ((3, 6, 7), {"w": (3, 5, 6)}, lambda m, x: m.w.bmm(x)),
    "addmm": ((7, 6), {"w": (6, 5), "b": (5,)}, lambda m, x: torch.addmm(m.b, x, m.w)),
    "addmm, whole bias": ((7, 6), {"w": (6, 5), "b": (7, 5)}, lambda m, x: torch.addmm(m.b, x, m.w)),
    "addmm, scaled": ((7, 6), {"w": (6, 5), "b": (5,)}, lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5, alpha=2.0)),
    "addmm, adds an activation": ((7, 6), {"w": (6, 6)}, lambda m, x: x.addmm(x.sin(), m.w)),
    "baddbmm": ((3, 7, 6), {"w": (3, 6, 5), "b": (3, 7, 5)}, lambda m, x: torch.baddbmm(m.b, x, m.w)),
    "einsum": ((3, 7, 6), {"w": (6, 5)}, lambda m, x: torch.einsum("bti,io->bto", x, m.w)),
    "einsum, heads": ((3, 7, 6), {"w": (2, 6, 5)}, lambda m, x: torch.einsum("bti,hio->bhto", x, m.w)),
    "conv1d": ((3, 6, 11), {"w": (4, 6, 3), "b": (4,)}, lambda m, x: F.conv1d(x, m.w, m.b, stride=2, padding=1)),
    "conv1d, depthwise": ((3, 6, 11), {"w": (6, 1, 4), "b": (6,)}, lambda m, x: F.conv1d(x, m.w, m.b, padding=3, groups=6)),
    "conv1d, one item": ((6, 11), {"w": (4, 6, 3)}, lambda m, x: F.conv1d(x, m.w)),
    "conv1d, same": ((3, 6, 11), {"w": (4, 6, 3)}, lambda m, x: F.conv1d(x, m.w, padding="same", dilation=2)),
    "conv1d, squeezed weight": ((3, 6, 11), {"w": (6, 1, 4)}, lambda m, x: F.conv1d(x, m.w.squeeze(1)[:, None], groups=6)),
    "conv2d": ((2, 6, 9, 8), {"w": (4, 3, 3, 2), "b": (4,)}, lambda m, x: F.conv2d(x, m.w, m.b, padding=(1, 0), groups=2)),
    "conv3d": ((2, 3, 5, 4, 6), {"w": (4, 3, 2, 2, 2)}, lambda m, x: F.conv3d(x, m.w, stride=(1, 2, 1))),
    "indexed expert": ((7, 6), {"w": (3, 5, 6)}, lambda m, x: F.linear(x, m.w[1]) + F.linear(x, m.w[torch.tensor(2)])),
    "chunks": ((7, 6), {"w": (10, 6)}, lambda m, x: F.linear(x, m.w.chunk(2)[0]) * F.linear(x, m.w.chunk(2)[1])),
    "scaled weight": ((7, 6), {"w": (5, 6), "s": (5, 1)}, lambda m, x: F.linear(x, m.w * m.s)),
    "sum of weights": ((7, 6), {"w": (5, 6), "v": (5, 6)}, lambda m, x: F.linear(x, m.w + m.v)),
    "cast weight": ((7, 6), {"w": (5, 6)}, lambda m, x: F.linear(x.bfloat16(), m.w.bfloat16()).float()),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_operator(name, strided, autocast):
    shape, shapes, function = PRODUCTS[name]
    module = Holder(function, **shapes)
    run = on_random(shape, strided)
    assert_same_bits(module, run, autocast=autocast)
    assert deferred_parameters(module, run) == set(shapes)


@pytest.mark.parametrize("name", PRODUCTS)
def test_operator_under_checkpointing(name):
    shape, shapes, function = PRODUCTS[name]
    calls = []

    def once_more(module, x):
        calls.append(1)
        return function(module, x).sin()

    module = Holder(lambda m, x: checkpoint(once_more, m, x.cos(), use_reentrant=False), **shapes)
    assert_same_bits(module, on_random(shape), num_microbatches=2, allowed=("linear",))
    assert len(calls) == 2 * 2 * 2  # plain and split, two microbatches, F and one recomputation


@pytest.mark.parametrize("name", PRODUCTS)
def test_input_without_gradient(name):
    shape, shapes, function = PRODUCTS[name]
    assert_same_bits(Holder(function, **shapes), on_random(shape, needs_gradient=False))


@pytest.mark.parametrize("name", PRODUCTS)
def test_output_changed_in_place(name):
    shape, shapes, function = PRODUCTS[name]

    def changed(module, x):
        output = function(module, x)
        output.add_(1.0)
        output[:1].mul_(2.0)
        return output * function(module, x)[None]

    assert_same_bits(Holder(changed, **shapes), on_random(shape))


@pytest.mark.parametrize("options", [{}, {"padding_idx": -2}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_embedding_has_all_of_its_backward_in_w(options):
    module = nn.Embedding(20, 6, **options)

    def run(module):
        return weigh(module(torch.randint(0, 20, (3, 5)))), None

    if options.get("sparse"):
        module.register_parameter("other", nn.Parameter(torch.ones(1)))
    plain = {}
    for split in (False, True):
        module.zero_grad()
        for seed in range(3):
            torch.manual_seed(seed)
            record = DeferredWeights()
            if split:
                with record.recording():
                    loss, _ = run(module)
                with record.recording():
                    loss.backward()
                assert module.weight.grad is None or seed
                accumulate(record.contributions())
            else:
                run(module)[0].backward()
        plain[split] = module.weight.grad.to_dense()
    assert torch.equal(plain[False], plain[True])


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
