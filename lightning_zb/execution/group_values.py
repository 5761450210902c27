"""What an optimizer's parameter groups hold beside parameters: learning rate, decay and the like."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Values = list[dict[str, Any]]


def group_values(optimizer: torch.optim.Optimizer) -> Values:
    """A copy of the values of all groups."""
    return [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def set_group_values(optimizer: torch.optim.Optimizer, values: Values) -> None:
    """Put values back; keys that are not among them keep what they have."""
    for group, new in zip(optimizer.param_groups, values, strict=True):
        for key, value in new.items():
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                group[key].copy_(value)  # schedulers hold on to a learning rate that is a tensor
            else:
                group[key] = value


def changed_values(now: Values, before: Values) -> Values:
    """The values that are not what they were."""
    return [
        {key: value for key, value in group.items() if not _same(value, old.get(key))}
        for group, old in zip(now, before, strict=True)
    ]


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return first is second or bool(first == second)
