"""All devices of a pipeline read the same batches: they start from one random state, and differences are noticed.

Each process runs the user's own loader. An extra random number drawn on one rank gives it another order, and the model
would train on garbage without any error.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_zb.model.runner import tensors_of


def checksum(microbatches: list[tuple[Any, ...]]) -> int:
    """A checksum over all tensors of a step's microbatches."""
    value = 0
    for t in tensors_of(microbatches):
        value = zlib.crc32(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), value)
    return value


def check_agreement(
    microbatches: list[tuple[Any, ...]], loader: Any, num_batches: float, group: dist.ProcessGroup | None = None
) -> None:
    """Compare this step's microbatches, and how many batches there will be, over all ranks of a pipeline (a collective).

    Args:
        microbatches: of this step.
        loader: the training loader, to be named.
        num_batches: batches of an epoch; infinity where unknown.
        group: the ranks to compare; None for all.

    Raises:
        RuntimeError: on every rank, when they differ.
    """
    mine = (num_batches, len(microbatches), checksum(microbatches))
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group)
    differing = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if not differing:
        return
    lengths = [other[0] for other in everyone]
    what = (
        f"{lengths[differing[0]]:g} batches an epoch, but rank 0 {lengths[0]:g}"
        if lengths[differing[0]] != lengths[0]
        else "other batches than rank 0"
    )
    raise RuntimeError(
        f"the training loader ({type(loader).__name__}) gives rank {differing[0]} {what}; all ranks of a pipeline must read "
        "the same: seed with seed_everything, give the loader's generator a fixed seed, and do not split the data by rank, "
        'or let one rank read for all: ZeroBubbleStrategy(data="broadcast")'
    )


def share_random_state(broadcast: Callable[[Any], Any]) -> None:
    """Give every process rank 0's generators: samplers draw from them and all ranks must shuffle alike (a collective).

    Args:
        broadcast: gives every process rank 0's value.
    """
    torch_state, numpy_state, python_state = broadcast((torch.get_rng_state(), np.random.get_state(), random.getstate()))
    torch.set_rng_state(torch_state)
    np.random.set_state(numpy_state)
    random.setstate(python_state)
