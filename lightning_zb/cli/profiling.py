"""The command `profile`: costs of a LightningModule's layers, measured on this machine.

Torch and Lightning are imported when the command runs: the others do without.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from lightning_zb.cli.problem import check_out
from lightning_zb.cli.text import byte_unit, table, time_unit
from lightning_zb.planning.costs import CostModel, Link
from lightning_zb.planning.planfile import write_costs
from lightning_zb.report.summary import Measured, weights_that_move
from lightning_zb.users_line import users_line


def profile(arguments: argparse.Namespace) -> bool:
    """Measure a module, print its costs, and write the costs file."""
    check_out("--out", arguments.out)
    if arguments.data is None and arguments.data_arguments:
        raise ValueError("--data-arguments: there is no --data to call with them")
    if arguments.device != "cpu":
        _check_device(arguments.device)
    sys.path.insert(0, os.getcwd())  # as python itself does for a script, unlike for an installed one
    module = _made("--module", arguments.module, arguments.arguments)
    data = None
    if arguments.data is not None:
        data = _made("--data", arguments.data, arguments.data_arguments)
    batch = None if arguments.batch is None else _made("--batch", arguments.batch, {})

    import lightning.pytorch as pl
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.utilities.model_helpers import is_overridden

    from lightning_zb.profiling import RepeatedBatch, profile_module

    if not isinstance(module, pl.LightningModule):
        raise ValueError(f"--module {arguments.module}: is a {type(module).__name__}, not a lightning.pytorch.LightningModule")
    if arguments.data is None and arguments.batch is None and not is_overridden("train_dataloader", module):
        raise ValueError(f"--module {arguments.module}: has no train_dataloader of its own; write --data or --batch")
    if arguments.batch is not None:
        data = RepeatedBatch(batch).loader()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")
    try:
        measured = profile_module(
            module,
            data,
            num_steps=arguments.steps,
            num_microbatches=arguments.microbatches,
            device=arguments.device,
            precision=arguments.precision,
            layers=arguments.layers,
            link=Link(arguments.latency, arguments.bandwidth),
        )
    except MisconfigurationException as error:  # what Lightning finds wrong with the module or the data
        raise ValueError(f"--module {arguments.module}: {_one_line(error)}") from error
    except Exception as error:
        place = users_line(error)
        if place is None:
            raise  # a refusal, or a defect of this package
        what = f"{type(error).__name__}: {_one_line(error)}"
        raise ValueError(f"--module {arguments.module}: its step failed in {place}, {what}") from error
    costs = measured.costs
    assert costs is not None
    print(costs_table(costs, measured.items))
    forward, backward = 1e3 * costs.overhead.forward, 1e3 * costs.overhead.backward_input
    print(f"besides its layers a pass takes {forward:.3f} ms in F and {backward:.3f} ms in B, once more for each chunk")
    if arguments.latency == 0.0 and arguments.bandwidth == float("inf"):
        print("transfers between devices count as free: one process cannot measure them; write --latency and --bandwidth")
    write_costs(costs, arguments.out)
    print(f"written to {arguments.out}")
    return True


def costs_table(costs: CostModel, items: Sequence[Measured] = ()) -> str:
    """The costs of every layer for one microbatch, and their sums.

    Args:
        costs: of the layers.
        items: what else is known of them: which share of W can move away from B.
    """
    second, time_name = time_unit(
        [max((max(c.forward, c.backward_input, c.backward_weight) for c in costs.layers), default=0.0)]
    )
    byte, byte_name = byte_unit(c.activation_bytes for c in costs.layers)
    header = ["layer", f"F ({time_name})", "B", "W", f"M_B ({byte_name})", "M_W", "output", "parameters", "states"]
    moving = [[weights_that_move(item)] for item in items] or [[] for _ in costs.layers]
    header += ["W moves"] if items else []
    rows = [
        [c.name]
        + [f"{t / second:.3f}" for t in (c.forward, c.backward_input, c.backward_weight)]
        + [
            f"{size / byte:.2f}"
            for size in (
                c.activation_bytes,
                c.weight_stash_bytes,
                c.output_bytes,
                c.parameter_bytes,
                c.parameter_bytes if c.state_bytes is None else c.state_bytes,
            )
        ]
        + more
        for c, more in zip(costs.layers, moving, strict=True)
    ]
    whole = costs.chunk(range(len(costs.layers)))
    sums = (whole.forward, whole.backward_input, whole.backward_weight)
    sizes = (whole.activation_bytes, whole.weight_stash_bytes, whole.parameter_bytes, whole.state_bytes)
    totals = [f"{size / byte:.2f}" for size in sizes]
    rows.append(["all", *(f"{t / second:.3f}" for t in sums), *totals[:2], "", *totals[2:], *([""] if items else [])])
    return table(header, rows)


def _made(option: str, place: str, arguments: dict[str, Any]) -> Any:
    """Import what stands at a place and call it.

    Raises:
        ValueError: it cannot be imported or called so; one sentence that names the option.
    """
    make = _imported(option, place)
    if not callable(make):
        raise ValueError(f"{option} {place}: is a {type(make).__name__}; name a class or a function that makes it")
    try:
        return make(**arguments)
    except Exception as error:  # whatever the user's code raises, it is the input that is wrong
        raise ValueError(f"{option} {place}: {type(error).__name__}: {_one_line(error)}") from error


def _imported(option: str, place: str) -> Callable[..., Any]:
    path, _, name = place.partition(":")
    try:
        found: Any = importlib.import_module(path)
    except Exception as error:
        raise ValueError(f"{option} {place}: {path} cannot be imported, {type(error).__name__}: {_one_line(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{option} {place}: {path} has no {name}")
        found = getattr(found, part)
    return found


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _check_device(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device here; write --device cpu")
