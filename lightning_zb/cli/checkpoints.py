"""The command `consolidate`: a checkpoint directory made the plain Trainer's file. Torch is imported when it runs."""

from __future__ import annotations

import argparse
import pickle

from lightning_zb.cli.problem import check_out


def consolidate(arguments: argparse.Namespace) -> bool:
    """Read the directory whole, and write the file."""
    check_out("FILE", arguments.file)
    if not arguments.directory.is_dir():
        raise ValueError(f"{arguments.directory} is not a directory, so there is nothing to consolidate")

    import torch

    from lightning_zb import sharded_checkpoint

    try:
        checkpoint = sharded_checkpoint.consolidate(arguments.directory, weights_only=not arguments.trust)
    except pickle.UnpicklingError as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{arguments.directory} holds more than tensors and plain values, which loading would run ({first}); "
            "write --trust if you know where it comes from"
        ) from error
    torch.save(checkpoint, arguments.file)
    weights, states = checkpoint["state_dict"], checkpoint.get("optimizer_states", [])
    size = sum(t.numel() * t.element_size() for t in weights.values() if isinstance(t, torch.Tensor))
    print(f"{len(weights)} tensors of {size} bytes, step {checkpoint.get('global_step')}, {len(states)} optimizers")
    print(f"written to {arguments.file}")
    return True
