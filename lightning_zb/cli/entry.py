"""Entry point of the console script, and what its exit codes mean."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lightning_zb.cli.options import make_parser
from lightning_zb.cli.text import as_option
from lightning_zb.planning.budget import InfeasibleBudget

FEASIBLE, BAD_INPUT, INFEASIBLE = 0, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the arguments after the program's name; None: those of the process.

    Returns:
        The exit code: 0 feasible, 3 infeasible (the smallest feasible budget is printed), 2 bad input (one sentence on
        stderr).
    """
    try:
        arguments = make_parser().parse_args(argv)
        return FEASIBLE if arguments.run(arguments) else INFEASIBLE
    except InfeasibleBudget as error:
        print(f"infeasible: {error}", file=sys.stderr)
        print(f"smallest feasible --memory-budget: {as_option(error.smallest)}")
        return INFEASIBLE
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        if isinstance(error, FileNotFoundError) and error.filename:
            what = f"there is no file {error.filename}; write the path of one that exists"
        elif isinstance(error, IsADirectoryError):
            what = f"{error.filename} is a folder; write the path of a file in it"
        print(f"lightning-zb: {what}", file=sys.stderr)
    except (ValueError, ImportError) as error:
        print(f"lightning-zb: {error}", file=sys.stderr)
    return BAD_INPUT
