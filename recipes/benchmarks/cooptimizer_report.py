"""The report of the co-optimizer's measurements: tables in Markdown, and pictures in the manner of the second paper's figures.

python -m recipes.benchmarks.cooptimizer_report results.jsonl --out report.md --pictures pictures
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from recipes.benchmarks import cooptimizer_pictures as pictures
from recipes.benchmarks.cooptimizer import DEVICES_OF_SIZE
from recipes.benchmarks.fidelity import table as fidelity

Row = dict[str, Any]

BASELINES = ("s-1f1b", "i-1f1b", "zb", "mist", "mist-layers", "hanayo")
PAPER = {"s-1f1b": 1.34, "i-1f1b": 1.42, "zb": 1.34, "mist": 1.20, "mist-layers": 1.20}
"""Average speed-ups that the second paper reports."""


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean, as the papers average speed-ups."""
    values = list(values)
    return sum(values) / len(values)


def speed_ups(rows: Iterable[Row], baseline: str, over: str = "ours") -> list[float]:
    """Step times of a baseline over ours (or over the floor) where the baseline exists."""
    return [row["baselines"][baseline] / row[over] for row in rows if row["baselines"][baseline]]


def best_baseline(row: Row) -> float:
    """The least step time of the baselines."""
    return min(time for time in row["baselines"].values() if time)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def summary(rows: list[Row]) -> list[str]:
    """Average speed-ups, for all rows and groups of them, each beside what no plan can exceed."""
    groups: dict[str, list[Row]] = {"all": rows}
    for name, unit in (("tokens", "tokens"), ("P", "devices"), ("m", "microbatches")):
        for value in sorted({row[name] for row in rows}):
            groups[f"{value} {unit}"] = [row for row in rows if row[name] == value]
    for part in (0, 2):
        for value in dict.fromkeys(row["config"].rpartition("-")[part] for row in rows):
            groups[value] = [row for row in rows if row["config"].rpartition("-")[part] == value]
    groups["devices that grow with the size"] = [r for r in rows if r["P"] == DEVICES_OF_SIZE[r["config"].rpartition("-")[2]]]
    lines = []
    for key, members in groups.items():
        pairs = [(speed_ups(members, b), speed_ups(members, b, "floor")) for b in BASELINES]
        cells = [f"{mean(ours):.3f} ({mean(most):.3f})" if ours else "-" for ours, most in pairs]
        least = min(best_baseline(row) / row["ours"] for row in members)
        lines.append([key, str(len(members)), *cells, f"{least:.4f}"])
    paper = ["the paper", "", *(f"{PAPER[b]:.2f}" if b in PAPER else "" for b in BASELINES), ""]
    return table(["cases", "number", *BASELINES, "least over the best baseline"], [*lines, paper])


def each(rows: list[Row]) -> list[str]:
    """Every case: milliseconds, speed-up over the best baseline, gap to the floor, generation, peaks."""
    lines = []
    for row in rows:
        peaks = [f"{p / 1e9:.0f}" if (p := row["baseline_peaks"][b]) else "-" for b in BASELINES]
        times = [f"{1e3 * t:.1f}" if (t := row["baselines"][b]) else "-" for b in BASELINES]
        best = best_baseline(row)
        lines.append(
            [
                row["config"], str(row["tokens"]), str(row["P"]), str(row["m"]), *times, f"{1e3 * row['ours']:.1f}",
                f"{best / row['ours']:.3f}", f"{abs(100 * (row['ours'] / row['floor'] - 1)):.1f} %", f"{row['seconds']:.1f}",
                f"{row['peak'] / 1e9:.0f}", "/".join(peaks),
                " ".join(map(str, row["chunks"])),
            ]
        )  # fmt: skip
    header = ["model", "tokens", "P", "m", *BASELINES, "ours", "speed-up", "over floor", "seconds", "peak (GB)",
              "peaks of baselines", "chunks of devices"]  # fmt: skip
    return table(header, lines)


def ablation(rows: list[Row]) -> list[str]:
    """Speed-up over no phase at all, by the phases that are tuned."""
    plain = {row["config"]: row["ours"] for row in rows if not row["phases"]}
    configs = list(plain)
    by_phases: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row["config"] in plain:
            by_phases[" + ".join(row["phases"]) or "none"][row["config"]] = plain[row["config"]] / row["ours"]
    lines = [
        [name, *(f"{gains[c]:.3f}" if c in gains else "-" for c in configs), f"{mean(gains.values()):.3f}"]
        for name, gains in by_phases.items()
    ]
    return table(["phases tuned", *configs, "mean"], lines)


def random_cases(rows: list[Row]) -> list[str]:
    """Against the best schedule by name, by kind of case."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["name"].split()[0]].append(row)
    lines = []
    for key, members in groups.items():
        gains = [row["named"] / row["ours"] for row in members if row["named"]]
        nothing = sum(row["named"] is None for row in members)
        lines.append(
            [key, str(len(members)), f"{mean(gains):.3f}", f"{min(gains):.4f}", f"{max(gains):.3f}",
             f"{mean(row['ours'] / row['bound'] for row in members):.4f}", str(nothing),
             f"{mean(row['seconds'] for row in members):.1f}"]
        )  # fmt: skip
    header = ["case", "number", "mean speed-up", "least", "most", "ours over its bound", "no named one fits", "seconds"]
    return table(header, lines)


def sequence(rows: list[Row]) -> list[str]:
    """Nemotron-H (large) by sequence length."""
    lines = [
        [str(row["tokens"]), f"{row['m'] * row['tokens'] / row['ours'] / 1e3:.0f}",
         *(f"{t / row['ours']:.3f}" if (t := row["baselines"][b]) else "-" for b in BASELINES), f"{row['peak'] / 1e9:.0f}"]
        for row in rows
    ]  # fmt: skip
    header = ["tokens", "thousand tokens/s", *(f"over {b}" for b in BASELINES), "peak (GB)"]
    return table(header, lines)


def scaling(rows: list[Row]) -> list[str]:
    """Throughput of 8 to 128 devices, gradient reduction included."""
    lines = []
    for kind in ("strong", "weak"):
        members = sorted((r for r in rows if r["kind"] == kind), key=lambda r: r["replicas"])
        for row in members:
            tokens = row["replicas"] * row["m"] * row["tokens"]
            rates = {"ours": tokens / (row["ours"] + row["reduction"])}
            rates |= {b: tokens / (t + row["reduction"]) for b in BASELINES if (t := row["baselines"][b])}
            first = members[0]
            start = first["replicas"] * first["m"] * first["tokens"] / (first["ours"] + first["reduction"])
            lines.append(
                [kind, str(8 * row["replicas"]), str(row["m"]), f"{1e3 * row['reduction']:.0f}",
                 *(f"{rates[b] / 1e3:.0f}" if b in rates else "-" for b in ("ours", *BASELINES)),
                 f"{100 * rates['ours'] / start:.0f} %"]
            )  # fmt: skip
    header = ["scaling", "devices", "m of a pipeline", "reduction (ms)", "ours (thousand tokens/s)", *BASELINES, "of 8 devices"]
    return table(header, lines)


def generation(rows: list[Row]) -> list[str]:
    """Seconds of ours and of the exact solver."""
    lines = [
        [str(row["P"]), str(row["m"]), str(row["passes"]), f"{row['seconds']:.2f}", f"{row['exact_seconds']:.1f}",
         "proved" if row["proved"] else "not proved", f"{abs(row['ours'] / row['exact_bound'] - 1):.2%}"]
        for row in rows
    ]  # fmt: skip
    header = ["P", "m", "passes", "ours (s), partition and placement too", "exact (s), order only", "optimum",
              "ours over the solver's bound"]  # fmt: skip
    return table(header, lines)


def optimality(rows: list[Row]) -> list[str]:
    """Ours over the optimum of small cases."""
    kinds = {
        "order": "order, same partition and placement, P=3, m=3",
        "joint": "partition into up to 4 chunks, placement and order, P=2, m=2",
    }
    lines = []
    for kind, meaning in kinds.items():
        gaps = [row["ours"] / row["exact"] - 1 for row in rows if row["name"].startswith(kind)]
        proved = sum(row["proved"] for row in rows if row["name"].startswith(kind))
        if gaps:
            share = str(proved) if kind == "order" else "enumerated"
            lines.append([meaning, str(len(gaps)), share, f"{mean(gaps):.2%}", f"{max(gaps):.2%}"])
    return table(["what is optimal", "cases", "proved", "ours over it, mean", "most"], lines)


SECTIONS: dict[str, tuple[str, Callable[[list[Row]], list[str]]]] = {
    "grid": ("Nine configurations: average speed-ups (in brackets: what no plan can exceed)", summary),
    "ablation": ("Each phase alone and together, speed-up over 1F1B with even layers", ablation),
    "random": ("Random heterogeneous cases, against every schedule by name and partition", random_cases),
    "optimality": ("Small random cases: ours against the optimum", optimality),
    "sequence": ("Sequence lengths: Nemotron-H (large), P=8, m=64", sequence),
    "scaling": ("Strong and weak scaling: Nemotron-H (large), pipelines of 8", scaling),
    "generation": ("Generation time against the exact solver: Gemma (small)", generation),
    "fidelity": ("Fidelity: real runs on layers of known times", fidelity),
}


def report(rows: list[Row]) -> str:
    """All tables of what was measured."""
    parts: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        parts[row["part"]].append(row)
    lines = [f"# Co-optimisation of partition, placement and schedule, {date.today().isoformat()}", ""]
    for part, (title, write) in SECTIONS.items():
        if parts[part]:
            lines += [f"## {title}", "", *write(parts[part])]
    if parts["grid"]:
        slowest = max(parts["grid"], key=lambda row: row["seconds"])
        lines += [f"Slowest generation: {slowest['seconds']:.1f} s ({slowest['name']}).", "", "## Every case", "",
                  "Step times in ms; seconds are processor seconds of one process; peaks include model states.", "",
                  *each(parts["grid"])]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def main(argv: list[str] | None = None) -> None:
    """Read results, print or write the report, draw the pictures where asked."""
    parser = argparse.ArgumentParser(description="report of the co-optimizer's measurements")
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="Markdown file; default: print")
    parser.add_argument("--pictures", type=Path, help="folder for PNG files")
    arguments = parser.parse_args(argv)
    rows = [json.loads(line) for path in arguments.results for line in path.read_text().splitlines()]
    text = report(rows)
    if arguments.out:
        arguments.out.write_text(text)
    else:
        print(text, end="")
    if arguments.pictures:
        arguments.pictures.mkdir(parents=True, exist_ok=True)
        pictures.draw_all(rows, arguments.pictures)


if __name__ == "__main__":
    main()
