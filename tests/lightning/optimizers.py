"""Optimizers unlike torch's own, as users bring them."""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from itertools import chain
from typing import Any

import torch

BLOCK = 64
_CODES = torch.linspace(-1.0, 1.0, 256)


class Momentum8bit(torch.optim.Optimizer):
    """Momentum in 8 bits by blocks, kept as bitsandbytes keeps it: other shapes and dtypes than the parameter's.

    State of a parameter: `state1` (uint8, flat), `absmax1` (a number a block), `qmap1` (a table that all share), an integer
    `step`; small parameters have float state. Loading it must not cast it to the parameter's dtype.
    """

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0, min_size: int = 256) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.min_size = min_size
        self.codes = _CODES.clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = _run(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    if p.numel() < self.min_size:
                        state["state1"] = torch.zeros_like(p)
                    else:
                        state["state1"] = torch.full((p.numel(),), 128, dtype=torch.uint8)
                        state["absmax1"] = torch.zeros((p.numel() + BLOCK - 1) // BLOCK)
                        state["qmap1"] = self.codes
                state["step"] += 1
                momentum = self._read(state, p).mul_(0.9).add_(p.grad, alpha=0.1)
                self._write(state, momentum)
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(self._read(state, p), alpha=group["lr"])
        return loss

    def _read(self, state: dict[str, Any], p: torch.Tensor) -> torch.Tensor:
        if state["state1"].dtype != torch.uint8:
            return state["state1"].clone()
        values = state["qmap1"][state["state1"].long()]
        return (values * state["absmax1"].repeat_interleave(BLOCK)[: p.numel()]).view_as(p)

    def _write(self, state: dict[str, Any], value: torch.Tensor) -> None:
        if state["state1"].dtype != torch.uint8:
            state["state1"].copy_(value)
            return
        flat = value.reshape(-1)
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
        state["absmax1"].copy_(padded.abs().amax(1))
        scaled = padded / state["absmax1"].clamp(min=1e-30)[:, None]
        state["state1"].copy_(torch.bucketize(scaled, state["qmap1"]).clamp(max=255).view(-1)[: flat.numel()])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = deepcopy(state_dict)
        saved = list(chain(*(g["params"] for g in state_dict["param_groups"])))
        parameters = dict(zip(saved, chain(*(g["params"] for g in self.param_groups)), strict=True))
        state: dict[Any, Any] = defaultdict(dict)
        for index, values in state_dict["state"].items():
            state[parameters[index]] = values
        groups = [
            {**new, "params": old["params"]} for old, new in zip(self.param_groups, state_dict["param_groups"], strict=True)
        ]
        self.__setstate__({"state": state, "param_groups": groups})


class OneAtATime(torch.optim.SGD):
    """Scales each update by the parameter's own norm, as layer-wise optimizers do: it must see parameters whole."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = _run(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (p.norm() / p.grad.norm().clamp(min=1e-6)), alpha=group["lr"])
        return loss


def _run(closure: Any) -> Any:
    with torch.enable_grad():
        return None if closure is None else closure()


OPTIMIZERS: dict[str, Any] = {"Momentum8bit": Momentum8bit, "OneAtATime": OneAtATime}
