"""What travels between chunks: a nest of tensors and numbers, taken apart into flat tensors and a layout.

The layout (structure, shapes, dtypes, strides' order, need of gradient) is negotiated once; after that only tensors
travel. Numbers travel as tensors too, since they may change from one microbatch to the next.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How one tensor is laid out on both sides of a transfer.

    Args:
        shape: its shape.
        dtype: its dtype.
        requires_grad: whether its gradient comes back.
        dims: dimensions from the largest stride to the smallest where that is not their natural order, else None.
        on_host: whether it lives in CPU memory, whatever the chunks run on.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    dims: tuple[int, ...] | None = None
    on_host: bool = False

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{' with gradient' if self.requires_grad else ''}"

    def contiguous_view(self, tensor: Tensor) -> Tensor:
        """The tensor as contiguous memory in the order of its strides; no copy where it is dense."""
        return (tensor if self.dims is None else tensor.permute(self.dims)).contiguous()

    def empty(self, device: torch.device) -> Tensor:
        """Memory to receive `contiguous_view` into."""
        shape = self.shape if self.dims is None else tuple(self.shape[d] for d in self.dims)
        return torch.empty(shape, dtype=self.dtype, device=device)

    def restore(self, buffer: Tensor) -> Tensor:
        """The tensor with its own shape and strides, from a buffer made by `empty`."""
        if self.dims is None:
            return buffer
        inverse = sorted(range(len(self.dims)), key=self.dims.__getitem__)
        return buffer.permute(inverse)


@dataclass(frozen=True, slots=True)
class Layout:
    """The structure of a payload.

    Args:
        spec: the nest without its leaves.
        leaves: for each leaf the index of its tensor, or a constant (None, a string, a dtype, a number's type).
        tensors: the tensors, each once however often it stands in the nest; numbers last.
    """

    spec: Any
    leaves: tuple[Any, ...]
    tensors: tuple[TensorLayout, ...]

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.tensors))}]"

    @property
    def num_bytes(self) -> int:
        """Bytes of one transfer."""
        return sum(torch.Size(t.shape).numel() * t.dtype.itemsize for t in self.tensors)

    def to_bytes(self) -> bytes:
        """The layout as its header travels."""
        return pickle.dumps(self)

    @staticmethod
    def from_bytes(data: bytes) -> Layout:
        """Read a header."""
        with warnings.catch_warnings():  # unpickling torch's own LeafSpec warns on some versions
            warnings.simplefilter("ignore", FutureWarning)
            return pickle.loads(data)


@dataclass(frozen=True, slots=True)
class Packet:
    """A payload taken apart; its tensors carry no graph."""

    layout: Layout
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Index:
    """A leaf that is a tensor."""

    index: int


@dataclass(frozen=True, slots=True)
class _Number:
    """A leaf that is a number and travels at a position of the integers' or of the floats' tensor."""

    kind: type
    position: int


_LEAF = pytree.tree_flatten(None)[1]
_NUMBERS = {bool: torch.int64, int: torch.int64, float: torch.float64}
_CONSTANTS = (str, torch.dtype, torch.device, type(None))


def flatten(payload: Any) -> tuple[Layout, tuple[Tensor, ...]]:
    """Take a payload apart, keeping the graph.

    Args:
        payload: any nest of tensors, numbers, booleans, strings and None.

    Returns:
        The layout and the tensors, still part of their graph.

    Raises:
        TypeError: something else stands in the nest.
    """
    flat, spec = ([payload], _LEAF) if isinstance(payload, Tensor) else pytree.tree_flatten(payload)
    tensors: list[Tensor] = []
    numbers: dict[torch.dtype, list[int | float]] = {}
    index_of: dict[int, int] = {}
    leaves: list[Any] = []
    for leaf in flat:
        if isinstance(leaf, Tensor):
            if id(leaf) not in index_of:
                index_of[id(leaf)] = len(tensors)
                tensors.append(leaf)
            leaves.append(_Index(index_of[id(leaf)]))
        elif type(leaf) in _NUMBERS:
            values = numbers.setdefault(_NUMBERS[type(leaf)], [])
            leaves.append(_Number(type(leaf), len(values)))
            values.append(leaf)
        elif isinstance(leaf, _CONSTANTS):
            leaves.append(leaf)
        else:
            raise TypeError(
                f"a chunk hands over a {type(leaf).__name__}, which cannot be sent; "
                "hand over tensors, numbers, booleans, strings, None and nests of them"
            )
    tensors += [torch.tensor(numbers[dtype], dtype=dtype) for dtype in (torch.int64, torch.float64) if dtype in numbers]
    return Layout(spec, tuple(leaves), tuple(map(tensor_layout, tensors))), tuple(tensors)


def unflatten(layout: Layout, tensors: Sequence[Tensor]) -> Any:
    """Put a payload together again from the tensors of its layout."""
    numbers = _received_numbers(layout, tensors)
    leaves = []
    for leaf in layout.leaves:
        if isinstance(leaf, _Index):
            leaves.append(tensors[leaf.index])
        elif isinstance(leaf, _Number):
            leaves.append(leaf.kind(numbers[_NUMBERS[leaf.kind]][leaf.position]))
        else:
            leaves.append(leaf)
    return pytree.tree_unflatten(leaves, layout.spec)


def _received_numbers(layout: Layout, tensors: Sequence[Tensor]) -> dict[torch.dtype, list[Any]]:
    """The numbers by the dtype they travel as; their tensors stand last, integers before floats."""
    dtypes = sorted({_NUMBERS[leaf.kind] for leaf in layout.leaves if isinstance(leaf, _Number)}, key=str, reverse=True)
    return {dtype: tensor.tolist() for dtype, tensor in zip(dtypes, tensors[len(tensors) - len(dtypes) :], strict=True)}


def tensor_layout(tensor: Tensor) -> TensorLayout:
    """The layout of one tensor; strides are kept where its memory is dense (a transposed activation stays transposed)."""
    dims = None
    if not tensor.is_contiguous():
        strides = tensor.stride()
        order = tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], d)))
        dims = order if tensor.permute(order).is_contiguous() else None
    needs_gradient = tensor.requires_grad and torch.is_grad_enabled()
    return TensorLayout(tuple(tensor.shape), tensor.dtype, needs_gradient, dims, tensor.device.type == "cpu")


def pack(payload: Any) -> Packet:
    """Take a payload apart for a transfer: its tensors without their graph."""
    layout, tensors = flatten(payload)
    return Packet(layout, tuple(t.detach() for t in tensors))
