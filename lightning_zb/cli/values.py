"""How the values of options are read; what is wrong with one is said in a sentence."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning_zb.cli.baselines import BASELINES
from lightning_zb.planning.budget import DeviceBudget, MemoryBudget, parse_bytes
from lightning_zb.planning.partitioning import PartitionSpec
from lightning_zb.planning.registry import find_schedule


@dataclass(frozen=True, slots=True)
class CostsFile:
    """A costs file of `compare`, with the microbatches of a step where they were written behind it."""

    path: Path
    num_microbatches: int | None = None


def memory_budget(text: str) -> MemoryBudget:
    """A memory budget: `1.5`, `40GiB`, or one for each device, `40GiB,24GiB`."""
    entries = [_device_budget(entry.strip()) for entry in text.split(",")]
    return entries[0] if len(entries) == 1 else entries


def _device_budget(text: str) -> DeviceBudget:
    try:
        number = float(text)
    except ValueError:
        _explained(parse_bytes, text)
        return text
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number; 1.0 is what 1f1b needs")
    return number


def partition(text: str) -> PartitionSpec:
    """A partition: `auto`, `even`, `balanced`, or layer counts, `3,4,4,3`."""
    if text in ("auto", "even", "balanced"):
        return text
    counts = text.split(",")
    if not all(count.strip().isdigit() and int(count) > 0 for count in counts):
        raise argparse.ArgumentTypeError(f"{text!r} is not auto, even, balanced, or layer counts such as 3,4,4,3")
    return [int(count) for count in counts]


def items(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def schedule_name(text: str, also: Iterable[str] = ()) -> str:
    """The name of a schedule that `make_plan` knows; `also` are others that the option takes."""
    if text in BASELINES:
        same = BASELINES[text]
        raise argparse.ArgumentTypeError(
            f"schedule {text!r} is a baseline of compare; write --schedule {same.schedule} --partition {same.partition}"
        )
    _explained(partial(find_schedule, also=also), text)
    return text


def schedule_list(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in BASELINES:
            schedule_name(name, BASELINES)
    return names


def _explained(read: Callable[[str], object], text: str) -> None:
    """Let argparse put the option's name in front of what is wrong."""
    try:
        read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def costs_file(text: str) -> CostsFile:
    path, colon, number = text.rpartition(":")
    if not colon or not number.isdigit():
        return CostsFile(Path(text))
    return CostsFile(Path(path), count(number))


def count(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count (1, 2, 3, ...)")
    return int(text)


def seed(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed (0, 1, 2, ...)")
    return int(text)


def seconds(text: str) -> float:
    return _number(float, text, lambda value: value > 0, "a positive number of seconds")


def latency(text: str) -> float:
    """Seconds; 0 where a transfer starts at once."""
    return _number(float, text, lambda value: 0 <= value < float("inf"), "a number of seconds, 0 or more")


def bandwidth(text: str) -> float:
    """Bytes per second: `25GB` or a number."""
    return _number(_number_of_bytes, text, lambda value: value > 0, "a number of bytes a second; write for example 25GB")


def _number_of_bytes(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return parse_bytes(text)


def _number(read: Callable[[str], float], text: str, is_right: Callable[[float], bool], what: str) -> float:
    with suppress(ValueError):
        value = read(text)
        if is_right(value):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not {what}")


def located(text: str) -> str:
    """The place of a class or function, `package.module:Name`."""
    module, colon, name = text.partition(":")
    if not module or not colon or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not a place such as package.module:Name")
    return text


def json_object(text: str) -> dict[str, Any]:
    """Arguments by name, as JSON: `{"layers": 12}`."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error}); write for example '{{\"layers\": 12}}'") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object; write for example '{{\"layers\": 12}}'")
    return value
