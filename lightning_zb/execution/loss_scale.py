"""The loss scaler of 16-bit training over the devices of a pipeline.

Every device has the scaler, unscales its own gradients and moves the scale by what is known of the whole model: an
overflow on one device backs the scale off on all, at the same step as in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zb.execution.host_copy import HostCopy, copy_to_host


@dataclass(frozen=True, slots=True)
class LossScale:
    """A loss scaler as one device of a pipeline uses it.

    Args:
        scaler: scales the loss before its backward; `unscale_` has been called when a step ends.
        optimizer: whose gradients it unscales.
    """

    scaler: torch.amp.GradScaler
    optimizer: torch.optim.Optimizer

    def overflow(self, copy: Callable[[Tensor], HostCopy] = copy_to_host) -> HostCopy | None:
        """Whether a gradient of this device is not finite: positive if so; None where it has no gradient."""
        found = list(self._found().values())
        return copy(torch.stack([f.to(found[0].device) for f in found]).sum()) if found else None

    def update(self, overflowed: bool) -> None:
        """Back off or grow, as after the same step of the unsplit model."""
        found = self._found()
        if not found:  # the scaler needs to hear of an overflow somewhere, even on a device without gradients
            device = self.scaler._scale.device  # type: ignore[union-attr]
            found[device] = torch.zeros((), device=device)
        for flag in found.values():
            flag.fill_(float(overflowed))
        self.scaler.update()

    def _found(self) -> dict[torch.device, Tensor]:
        return self.scaler._per_optimizer_states[id(self.optimizer)]["found_inf_per_device"]
