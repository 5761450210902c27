"""Each operator whose weight gradient waits for W, against plain autograd, whatever its layout, precision or surroundings."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_zb.execution.split_backward import DeferredWeights, accumulate
from tests.execution.split_comparison import Holder, assert_same_bits, deferred_parameters, on_random, weigh


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

    def gradient():
        return torch.zeros_like(module.weight) if module.weight.grad is None else module.weight.grad.to_dense().clone()

    plain = {}
    for split in (False, True):
        module.zero_grad()
        for seed in range(3):
            torch.manual_seed(seed)
            record = DeferredWeights()
            if split:
                with record.recording():
                    loss, _ = run(module)
                before = gradient()
                with record.recording():
                    loss.backward()
                assert torch.equal(gradient(), before)
                accumulate(record.contributions())
            else:
                run(module)[0].backward()
        plain[split] = gradient()
    assert torch.equal(plain[False], plain[True])
