"""What floor 2 asks of the floors above it: how a chunk runs forward, and who owns the optimizer step.

The executor knows nothing of Lightning or of the user's model; offline tests implement both protocols in a few lines.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

import torch
from torch import nn

Payload = Any
"""What one chunk hands to the next: any nest of tensors, numbers, booleans, strings and None."""


class ChunkRunner(Protocol):
    """Runs the forward of a chunk on a microbatch of the current step."""

    def forward(self, chunk: int, microbatch: int, received: Payload) -> Payload:
        """Run F.

        Args:
            chunk: the chunk to run.
            microbatch: which microbatch of the step, counted from 0.
            received: the payload of chunk - 1 (tensors are leaves of this chunk's graph); None for chunk 0.

        Returns:
            The payload for chunk + 1; on the last chunk the loss to call backward on, a scalar tensor that is
            already divided for gradient accumulation.
        """
        ...

    def signature(self, microbatch: int) -> Hashable:
        """Shapes and dtypes of the microbatch's tensors, equal on every device of the pipeline.

        Two microbatches of one signature yield payloads of one layout, so layouts are negotiated once per signature.
        """
        ...

    def shared_parameters(self) -> dict[nn.Parameter, tuple[int, ...]]:
        """Parameters used by several chunks of this device, with those chunks; empty where nothing is tied."""
        ...

    def tied_parameters(self) -> dict[nn.Parameter, tuple[int, ...]]:
        """Parameters that chunks on other devices use too, with all those chunks; `shared_parameters` leaves them out."""
        ...


class StepOwner(Protocol):
    """Owns parameters and optimizer, and says what a restarted step must find as it was."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer whose steps are held, undone and redone; its groups hold all parameters of the unsplit model."""
        ...

    @property
    def is_shared(self) -> bool:
        """Whether a step is complete only once `share` has given its values to the other replicas, and taken theirs."""
        ...

    def step(self) -> None:
        """Run the optimizer on the gradients that parameters hold now, with whatever belongs around a step."""
        ...

    def share(self) -> None:
        """Complete a step: replicas that divide the optimizer's state swap what they stepped (all of them call it)."""
        ...

    def buffers(self) -> list[torch.Tensor]:
        """What forwards of this device's chunks change (batch statistics, counters), restored before they are redone.

        Random state is not among it: every pass draws from its own stream and leaves the generators as it found them.
        """
        ...

    def is_copy(self, parameter: nn.Parameter) -> bool:
        """True where another device holds the same parameter and reports the norm of its gradient."""
        ...
