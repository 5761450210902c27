"""The global gradient norm of a model whose parameters are spread over devices, to the last bit.

`torch.nn.utils.clip_grad_norm_` groups gradients by device and dtype and combines per-parameter norms in parameter
order; permuting sixty norms changed the last bit of the total in three of four trials. So every parameter has a slot,
each device fills the slots of the gradients it holds, and the total is taken over the filled slots in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class NormSlots:
    """Per-parameter gradient norms of the unsplit model.

    Args:
        values: float64 of shape (num_parameters,); exact for float32, bfloat16 and float16 norms, 0 where empty.
        filled: float64 of the same shape, 1 where some device holds a gradient.
    """

    values: Tensor
    filled: Tensor

    def __add__(self, other: NormSlots) -> NormSlots:
        """Combine two devices; they fill different slots, so the addition is exact."""
        return NormSlots(self.values + other.values, self.filled + other.filled)


def local_norms(parameters: Sequence[nn.Parameter], owned: Sequence[bool] | None = None) -> NormSlots:
    """The 2-norms of the gradients this device holds.

    Args:
        parameters: all parameters of the unsplit model in the optimizer's order; those of other devices have no gradient.
        owned: False for a parameter whose gradient another device reports (a copy); None where there are no copies.
    """
    values = torch.zeros(len(parameters), dtype=torch.float64)
    filled = torch.zeros(len(parameters), dtype=torch.float64)
    held = [i for i, p in enumerate(parameters) if p.grad is not None and (owned is None or owned[i])]
    gradients = [g for i in held if (g := parameters[i].grad) is not None]
    if gradients:
        norms = _norms(gradients)
        values[held] = torch.stack([n.to(device="cpu", dtype=torch.float64) for n in norms])
        filled[held] = 1.0
    return NormSlots(values, filled)


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


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float, total: Tensor) -> None:
    """Scale the gradients this device holds by the coefficient of the whole model's norm."""
    own = [p for p in parameters if p.grad is not None]
    if own:
        torch.nn.utils.clip_grads_with_norm_(own, max_norm, total.to(own[0].device))
