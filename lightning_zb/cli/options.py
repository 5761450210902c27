"""The options of every command."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from lightning_zb.cli import values
from lightning_zb.cli.baselines import BASELINES
from lightning_zb.cli.checkpoints import consolidate
from lightning_zb.cli.commands import export, plan, show, simulate
from lightning_zb.cli.comparison import compare
from lightning_zb.cli.profiling import profile
from lightning_zb.planning.bounds import Objective
from lightning_zb.planning.registry import known_schedules

_EXIT_CODES = "exit codes: 0 feasible, 3 infeasible (the smallest feasible budget is printed), 2 bad input"


class InputError(ValueError):
    """An argument is missing or wrong."""


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one sentence, without the usage in front of it; options are written in full."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


def make_parser() -> argparse.ArgumentParser:
    """The parser; what it returns has the command to run as `run`."""
    parser = _Parser(
        prog="lightning-zb",
        description="Plan zero-bubble pipelines from the costs of layers, and measure those costs. "
        "Only profile needs a model, only consolidate a checkpoint.",
        epilog=_EXIT_CODES,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    _add_profile(commands)
    _add_plan(commands)
    _add_simulate(commands)
    _add_compare(commands)
    _add_show(commands)
    _add_export(commands)
    _add_consolidate(commands)
    return parser


def _command(commands, name: str, run: Callable[[argparse.Namespace], bool], summary: str, example: str) -> _Parser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"example:\n  {example}\n\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def _add_profile(commands) -> None:
    example = (
        "lightning-zb profile --module package.module:Model --data package.module:Data --out costs.json\n"
        "  lightning-zb profile --module package.module:Model --arguments '{\"depth\": 12}' --batch package.module:one_batch "
        "--device cuda --precision bf16-mixed --out costs.json"
    )
    parser = _command(
        commands, "profile", profile, "measure what a LightningModule's layers cost, and write a costs file", example
    )
    place = "package.module:Name"
    parser.add_argument(
        "--module",
        required=True,
        type=values.located,
        metavar=place,
        help="the LightningModule: its class, or a function that makes it",
    )
    parser.add_argument(
        "--arguments",
        default={},
        type=values.json_object,
        metavar="JSON",
        help="what to call it with, as a JSON object by name",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--data",
        type=values.located,
        metavar=place,
        help="a LightningDataModule or DataLoader, or a function that makes one; default: the module's own train_dataloader",
    )
    source.add_argument(
        "--batch", type=values.located, metavar=place, help="instead: a function that makes one batch, a microbatch"
    )
    parser.add_argument(
        "--data-arguments",
        default={},
        type=values.json_object,
        metavar="JSON",
        help="what to call --data with, as a JSON object by name",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="write the costs file (JSON) here")
    parser.add_argument(
        "--steps", default=6, type=values.count, metavar="N", help="steps that take times (default 6), after three that do not"
    )
    parser.add_argument("--microbatches", default=4, type=values.count, metavar="M", help="microbatches of a step (default 4)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where to run (default cpu)")
    parser.add_argument(
        "--precision",
        default="32-true",
        choices=("32-true", "bf16-true", "bf16-mixed", "16-mixed"),
        help="as the Trainer takes it (default 32-true)",
    )
    parser.add_argument(
        "--layers", metavar="PATH", help="dotted path of the container that holds the layers, where it is not found"
    )
    parser.add_argument(
        "--latency",
        default=0.0,
        type=values.latency,
        metavar="S",
        help="seconds that a transfer between two devices takes at the least",
    )
    parser.add_argument(
        "--bandwidth",
        default=float("inf"),
        type=values.bandwidth,
        metavar="X",
        help="bytes a second between two devices, such as 25GB",
    )


def _add_plan(commands) -> None:
    example = "lightning-zb plan --costs costs.json --devices 8 --microbatches 32 --memory-budget 1.0 --out plan.json"
    parser = _command(commands, "plan", plan, "find the best schedule for measured costs under a memory limit", example)
    parser.add_argument(
        "--costs", required=True, type=Path, metavar="FILE", help="costs file (JSON): seconds and bytes of every layer, links"
    )
    parser.add_argument("--microbatches", required=True, type=values.count, metavar="M", help="microbatches of a step")
    parser.add_argument(
        "--schedule", default="auto", type=values.schedule_name, metavar="NAME", help=f"auto (default) or one of {_names()}"
    )
    parser.add_argument(
        "--world-size",
        type=values.count,
        metavar="N",
        help="instead of --devices: choose how many pipelines of how many of these N devices make a step fastest; "
        "--microbatches counts those of all pipelines, and adding gradients over them is charged",
    )
    _add_problem(parser, devices_required=False)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the plan file (JSON) here")


def _add_simulate(commands) -> None:
    example = "lightning-zb simulate plan.json\n  lightning-zb simulate plan.json --costs measured-again.json"
    parser = _command(commands, "simulate", simulate, "run a plan through the performance model, device by device", example)
    _add_plan_file(parser)
    parser.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="say what the plan takes with these costs of the same layers instead",
    )


def _add_compare(commands) -> None:
    example = (
        "lightning-zb compare --costs costs.json --devices 8 --microbatches 32 --schedules 1f1b,zb-v,auto --memory-budget 1.0\n"
        "  lightning-zb compare --costs size1.json:32 size2.json:16 --devices 8 --schedules zb-1p,auto --memory-budget 40GiB"
    )
    parser = _command(commands, "compare", compare, "rank schedules at equal global batch and memory", example)
    parser.add_argument(
        "--costs",
        required=True,
        nargs="+",
        type=values.costs_file,
        metavar="FILE[:M]",
        help="costs files, one for each microbatch size; :M gives the microbatches of a step for this one, such that all "
        "files make the same global batch (half the microbatches at twice the size)",
    )
    parser.add_argument("--microbatches", type=values.count, metavar="M", help="microbatches of a step, for files without :M")
    parser.add_argument(
        "--schedules",
        required=True,
        type=values.schedule_list,
        metavar="A,B,C",
        help=f"auto, {_names()}; or baselines with a partition of their own: "
        + "; ".join(f"{name} ({baseline.meaning})" for name, baseline in BASELINES.items()),
    )
    parser.add_argument(
        "--ablation",
        action="store_true",
        help="also say what tuning partition, placement and schedule gains over 1f1b, each alone, in pairs and together",
    )
    _add_problem(
        parser, "; with several costs files a number counts in activations of the first, so that all get the same bytes"
    )


def _add_show(commands) -> None:
    example = "lightning-zb show plan.json --png plan.png"
    parser = _command(commands, "show", show, "draw a plan in the terminal, one line a device", example)
    _add_plan_file(parser)
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw it as a picture too (needs matplotlib)")


def _add_export(commands) -> None:
    example = "lightning-zb export plan.json --format chrome    # open plan.trace.json in ui.perfetto.dev"
    parser = _command(commands, "export", export, "write a plan for other tools", example)
    _add_plan_file(parser)
    parser.add_argument(
        "--format",
        required=True,
        choices=("chrome", "csv", "layout", "svg"),
        help="chrome: trace for Perfetto; csv: compute actions for torch.distributed.pipelining; layout: partition as "
        "Megatron-LM writes it, where chunks go to the devices in turn; svg: picture (matplotlib)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where to; default: beside the plan, as .trace.json, .csv, .layout.txt or .svg"
    )


def _add_consolidate(commands) -> None:
    example = "lightning-zb consolidate checkpoints/last.ckpt plain.ckpt"
    parser = _command(
        commands, "consolidate", consolidate, "make a checkpoint directory the file that the plain Trainer would have written",
        example,
    )  # fmt: skip
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="a checkpoint that save_distributed_checkpoint=True has written"
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the file to write; the whole model passes through memory")
    parser.add_argument(
        "--trust", action="store_true", help="also read pickled objects, which run code: only from where you trust"
    )


def _add_plan_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN", help="plan file (JSON) that the command plan has written")


def _add_problem(parser: argparse.ArgumentParser, about_budget: str = "", devices_required: bool = True) -> None:
    """What plan and compare have in common."""
    parser.add_argument("--devices", required=devices_required, type=values.count, metavar="P", help="devices of the pipeline")
    parser.add_argument(
        "--memory-budget",
        type=values.memory_budget,
        metavar="X",
        help="what each device may hold: a number counts activations alone, 1.0 is those of the whole model for one "
        "microbatch (what 1f1b needs); a size such as 40GiB is the whole device, model states included; one for each device "
        f"as 40GiB,40GiB,24GiB; default: the schedule's own, none for auto{about_budget}",
    )
    parser.add_argument(
        "--objective",
        default=Objective.STEP_TIME.value,
        choices=[objective.value for objective in Objective],
        help="what a search minimises and what counts: step_time (default; the longest device, first pass to last), period "
        "(per step, many in a row, with post-validation), makespan (one step alone, end to end: a synchronous optimizer step)",
    )
    parser.add_argument(
        "--effort",
        type=values.count,
        metavar="N",
        help="work units of a search: the same units and seed give the same plan on any machine, more never a worse one",
    )
    parser.add_argument("--seconds", type=values.seconds, metavar="S", help="let a search end after about that many seconds")
    parser.add_argument("--seed", type=values.seed, metavar="N", help="seed of a search, default 0")
    cuts = parser.add_mutually_exclusive_group()
    cuts.add_argument(
        "--partition",
        default=None,
        type=values.partition,
        metavar="SPEC",
        help="layers to chunks: auto (default; what schedule auto finds best, even for the others), even (equal layer counts), "
        "balanced (by time), or the layers of each chunk as 3,4,4,3",
    )
    cuts.add_argument(
        "--layout",
        dest="partition",
        metavar="TEXT",
        help="partition and placement as Megatron-LM writes them, 'Et*3|(t*4|)*2,t*3L': E the embedding (prologue), t a layer, "
        "m one too, L norm, head and loss (epilogue), | between chunks, which go to the devices in turn, (...) a group, *n to "
        "repeat an item or a group, commas and blanks of no meaning; chunks without items are refused",
    )
    for option, metavar, about in (
        ("--together", "A,B", "items that share a chunk, and those between them with them"),
        ("--first", "A", "an item that begins its chunk"),
        ("--alone", "A", "an item that is a chunk of its own"),
    ):
        parser.add_argument(
            option,
            action="append",
            type=values.items if option == "--together" else str,
            metavar=metavar,
            help=f"what schedule auto keeps to: {about}, by name in the costs file; may be repeated",
        )


def _names() -> str:
    return ", ".join(name for name in known_schedules() if name != "auto")
