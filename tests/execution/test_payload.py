"""Payloads: any nest goes through flat tensors and comes back the same."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from lightning_zb.execution.payload import Layout, flatten, pack, unflatten

Pair = namedtuple("Pair", "first second")

leaves = st.one_of(
    st.integers(-(2**60), 2**60),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False),
    st.text(max_size=3),
    st.builds(lambda n: torch.arange(n).float(), st.integers(0, 4)),
)
nests = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=8,
)


@given(nests)
def test_round_trip(payload):
    layout, tensors = flatten(payload)
    assert Layout.from_bytes(layout.to_bytes()) == layout
    again = unflatten(layout, tensors)
    a, spec_a = pytree.tree_flatten(payload)
    b, spec_b = pytree.tree_flatten(again)
    assert spec_a == spec_b
    for x, y in zip(a, b, strict=True):
        assert type(x) is type(y)
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def test_numbers_may_change_within_one_layout():
    assert flatten((3, 2.5, True))[0] == flatten((4, 0.5, False))[0]


def test_a_tensor_that_stands_twice_travels_once():
    x = torch.ones(2, requires_grad=True)
    packet = pack({"a": x, "b": (x, x * 2)})
    assert len(packet.tensors) == 2
    assert [t.requires_grad for t in packet.layout.tensors] == [True, True]
    assert not any(t.requires_grad for t in packet.tensors)
    again = unflatten(packet.layout, packet.tensors)
    assert again["a"] is again["b"][0]


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(3, 4).t(), torch.randn(2, 3, 4).permute(1, 2, 0), torch.tensor(1.5), torch.empty(0, 3)],
    ids=str,
)
def test_dense_strides_survive_without_a_copy(tensor):
    layout, (flat,) = flatten(tensor)
    sent = layout.tensors[0].contiguous_view(flat)
    assert sent.is_contiguous()
    assert sent.data_ptr() == tensor.data_ptr()
    buffer = layout.tensors[0].empty(torch.device("cpu"))
    buffer.copy_(sent)
    received = layout.tensors[0].restore(buffer)
    assert torch.equal(received, tensor)
    assert received.stride() == tensor.stride()


def test_a_slice_arrives_contiguous():
    tensor = torch.randn(4, 6)[:, ::2]
    layout, _ = flatten(tensor)
    sent = layout.tensors[0].contiguous_view(tensor)
    assert torch.equal(layout.tensors[0].restore(sent), tensor)


def test_nothing_needs_a_gradient_under_no_grad():
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not flatten(x)[0].tensors[0].requires_grad


def test_bytes_of_a_transfer():
    assert pack((torch.zeros(3, dtype=torch.bfloat16), 1, "x")).layout.num_bytes == 6 + 8


def test_what_cannot_travel_is_named():
    with pytest.raises(TypeError, match="hands over a set, which cannot be sent"):
        pack((torch.ones(1), {1, 2}))
