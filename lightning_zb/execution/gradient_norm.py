"""The global gradient norm of a model whose parameters are spread over devices, to the last bit.

`torch.nn.utils.clip_grad_norm_` groups gradients by device and dtype and combines per-parameter norms in parameter
order; permuting sixty norms changed the last bit of the total in three of four trials. So every parameter has a slot,
each device fills the slots of the gradients it holds, and the total is taken over the filled slots in that order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_zb.execution.host_copy import HostCopy, copy_to_host


@dataclass(frozen=True, slots=True)
class NormSlots:
    """Per-parameter gradient norms of the unsplit model.

    Args:
        values: float64 of shape (num_parameters,); exact for float32, bfloat16 and float16 norms, 0 where empty.
        filled: float64 of the same shape, 1 where some device holds a gradient.
    """

    values: Tensor
    filled: Tensor

    @classmethod
    def empty(cls, num_parameters: int) -> NormSlots:
        """No norm at all: of a device without gradients, or of a step that is not clipped."""
        return cls(torch.zeros(num_parameters, dtype=torch.float64), torch.zeros(num_parameters, dtype=torch.float64))

    def __add__(self, other: NormSlots) -> NormSlots:
        """Combine two devices; they fill different slots, so the addition is exact."""
        return NormSlots(self.values + other.values, self.filled + other.filled)


@dataclass(frozen=True, slots=True)
class LocalNorms:
    """The norms of a device's gradients, on their way to the host.

    Args:
        held: positions of the gradients among the parameters of the unsplit model.
        num_parameters: how many there are.
        norms: one norm for each gradient; None where there is none.
    """

    held: tuple[int, ...]
    num_parameters: int
    norms: HostCopy | None

    def get(self) -> NormSlots:
        """Wait until they have arrived."""
        slots = NormSlots.empty(self.num_parameters)
        if self.norms is not None:
            slots.values[list(self.held)] = self.norms.get()
            slots.filled[list(self.held)] = 1.0
        return slots


def local_norms(
    parameters: Sequence[nn.Parameter],
    owned: Sequence[bool] | None = None,
    copy: Callable[[Tensor], HostCopy] = copy_to_host,
) -> LocalNorms:
    """Start to compute the 2-norms of the gradients this device holds; the host does not wait for them.

    Args:
        parameters: all parameters of the unsplit model in the optimizer's order; those of other devices have no gradient.
        owned: False for a parameter whose gradient another device reports (a copy); None where there are no copies.
        copy: how norms reach the host.
    """
    held = [i for i, p in enumerate(parameters) if p.grad is not None and (owned is None or owned[i])]
    gradients = [g for i in held if (g := parameters[i].grad) is not None]
    norms = copy(torch.stack([n.double() for n in _norms(gradients)])) if gradients else None
    return LocalNorms(tuple(held), len(parameters), norms)


def _norms(gradients: list[Tensor]) -> list[Tensor]:
    """The kernels that `torch.nn.utils.get_total_norm` uses: foreach on CUDA and CPU, one call a tensor elsewhere."""
    if all(g.device.type in ("cpu", "cuda") and type(g) is Tensor for g in gradients):
        return list(torch._foreach_norm(gradients, 2.0))
    return [torch.linalg.vector_norm(g, 2.0) for g in gradients]


def total_norm(slots: NormSlots, parameters: Sequence[nn.Parameter]) -> Tensor:
    """The norm that `clip_grad_norm_` would compute on the unsplit model: slots in order, grouped by dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter, value, filled in zip(parameters, slots.values, slots.filled.tolist(), strict=True):
        if filled:
            by_dtype.setdefault(parameter.dtype, []).append(value.to(parameter.dtype))
    norms = [norm for group in by_dtype.values() for norm in group]
    if not norms:
        return torch.tensor(0.0)
    return torch.linalg.vector_norm(torch.stack(norms), 2.0)


def clip_gradients(gradients: Iterable[Tensor], max_norm: float, total: Tensor) -> None:
    """Scale gradients in place as `clip_grad_norm_` does: by 1 where nothing clips, not at all where nothing can.

    Args:
        gradients: of this device.
        max_norm: what the whole model's norm is clipped to.
        total: the norm.
    """
    gradients = list(gradients)
    if gradients and math.isfinite(max_norm):
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (total + 1e-6), max=1.0).to(gradients[0].device))
