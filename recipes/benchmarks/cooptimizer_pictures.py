"""Pictures of the co-optimizer's measurements, in the manner of the second paper's figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

ORDER = ("s-1f1b", "i-1f1b", "zb", "mist", "mist-layers", "hanayo", "ours")
COLOURS = dict(zip(ORDER, ("#9aa5b1", "#c7a76c", "#6fa287", "#7d8fc2", "#a9c1e0", "#b58bb0", "#c8553d"), strict=True))


def draw_all(rows: list[Row], folder: Path) -> None:
    """One file for each part that was measured."""
    import matplotlib

    matplotlib.use("Agg")
    for part, draw in _DRAWERS.items():
        members = [row for row in rows if row["part"] == part]
        if members:
            figure = draw(members)
            figure.tight_layout()
            figure.savefig(folder / f"{part}.png", dpi=110)


def _marked(axis: Any, values: list[float], unit: str = "") -> None:
    """Ticks at the values that were measured, written as plain numbers instead of powers."""
    axis.set_ticks(values, [f"{value:g}{unit}" for value in values], fontsize=8)
    axis.set_ticks([], minor=True)


def _times(row: Row) -> dict[str, Any]:
    return {**row["baselines"], "ours": row["ours"]}


def _by_size(row: Row) -> tuple[str, int]:
    """Families by name, sizes from small to large."""
    family, size = row["config"].rsplit("-", 1)
    return family, ("small", "medium", "large").index(size)


def _grid(rows: list[Row]) -> Any:
    """Speed-ups over s-1f1b by model, averaged over microbatches and tokens, one panel for each P."""
    from matplotlib import pyplot

    devices = sorted({row["P"] for row in rows})
    configs = list(dict.fromkeys(row["config"] for row in sorted(rows, key=_by_size)))
    figure, panels = pyplot.subplots(len(devices), 1, figsize=(10, 2.6 * len(devices)), sharex=True, squeeze=False)
    for axes, p in zip(panels[:, 0], devices, strict=True):
        for k, name in enumerate(ORDER):
            heights = []
            for config in configs:
                members = [r for r in rows if r["P"] == p and r["config"] == config and _times(r)[name]]
                gains = [r["baselines"]["s-1f1b"] / _times(r)[name] for r in members]
                heights.append(sum(gains) / len(gains) if gains else 0.0)
            places = [i + (k - 2.5) * 0.14 for i in range(len(configs))]
            axes.bar(places, heights, 0.13, label=name, color=COLOURS[name])
        axes.axhline(1.0, color="#555555", linewidth=0.6)
        axes.set_title(f"P = {p}", fontsize=9, loc="left")
        axes.set_ylabel("speed-up over s-1f1b", fontsize=8)
    panels[0, 0].legend(fontsize=7, ncols=len(ORDER), loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False)
    panels[-1, 0].set_xticks(range(len(configs)), configs, fontsize=8, rotation=20)
    return figure


def _ablation(rows: list[Row]) -> Any:
    """Speed-up by the phases that are tuned, one group of bars a model."""
    from matplotlib import pyplot

    plain = {row["config"]: row["ours"] for row in sorted(rows, key=_by_size) if not row["phases"]}
    names = list(dict.fromkeys("+".join(row["phases"]) for row in rows if row["phases"]))
    figure, axes = pyplot.subplots(figsize=(10, 3.4))
    for k, name in enumerate(names):
        found = {r["config"]: plain[r["config"]] / r["ours"] for r in rows if "+".join(r["phases"]) == name}
        places = [i + (k - len(names) / 2 + 0.5) * 0.11 for i in range(len(plain))]
        axes.bar(places, [found.get(c, 0.0) for c in plain], 0.1, label=name, color=pyplot.get_cmap("viridis")(k / len(names)))
    axes.axhline(1.0, color="#555555", linewidth=0.6)
    axes.set_xticks(range(len(plain)), list(plain), fontsize=8, rotation=20)
    axes.set_ylabel("speed-up over 1F1B, even layers", fontsize=8)
    axes.legend(fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return figure


def _sequence(rows: list[Row]) -> Any:
    """Throughput by sequence length; a line ends where nothing fits the memory."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.4))
    for name in ORDER:
        points = [(r["tokens"] / 1024, r["m"] * r["tokens"] / t / 1e3) for r in rows if (t := _times(r)[name])]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name, color=COLOURS[name])
    axes.set_xscale("log", base=2)
    _marked(axes.xaxis, [tokens // 1024 for tokens in sorted({r["tokens"] for r in rows})], "K")
    axes.set_xlabel("tokens of a sequence", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("thousand tokens per second", fontsize=8)
    axes.legend(fontsize=7)
    return figure


def _scaling(rows: list[Row]) -> Any:
    """Tokens per second by devices, strong and weak."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.4))
    for axes, kind in zip(panels, ("strong", "weak"), strict=True):
        members = sorted((r for r in rows if r["kind"] == kind), key=lambda r: r["replicas"])
        for name in ORDER:
            points = [
                (8 * r["replicas"], r["replicas"] * r["m"] * r["tokens"] / (t + r["reduction"]) / 1e6)
                for r in members
                if (t := _times(r)[name])
            ]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name, color=COLOURS[name])
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        _marked(axes.xaxis, [8 * r["replicas"] for r in members])
        _marked(axes.yaxis, [0.125, 0.25, 0.5, 1, 2])
        axes.set_title(kind, fontsize=9)
        axes.set_xlabel("devices", fontsize=8)
        axes.set_ylabel("million tokens per second", fontsize=8)
    panels[0].legend(fontsize=7)
    return figure


def _generation(rows: list[Row]) -> Any:
    """Seconds to a plan by the passes of a step; hollow where the solver ran out of time."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.4))
    rows = sorted(rows, key=lambda r: r["passes"])
    passes = [r["passes"] for r in rows]
    axes.plot(passes, [r["seconds"] for r in rows], marker="o", color=COLOURS["ours"], label="ours, all three phases")
    for proved, face in ((True, COLOURS["mist"]), (False, "white")):
        found = [(r["passes"], r["exact_seconds"]) for r in rows if r["proved"] == proved]
        axes.plot(
            *zip(*found, strict=True),
            marker="s",
            linestyle="none",
            color=COLOURS["mist"],
            markerfacecolor=face,
            label="exact solver, order only" + ("" if proved else ", nothing proved"),
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    _marked(axes.xaxis, passes)
    _marked(axes.yaxis, [0.001, 0.01, 0.1, 1, 10])
    axes.set_xlabel("passes of a step", fontsize=8)
    axes.set_ylabel("seconds", fontsize=8)
    axes.legend(fontsize=7, loc="center")
    return figure


_DRAWERS: dict[str, Callable[[list[Row]], Any]] = {
    "grid": _grid,
    "ablation": _ablation,
    "sequence": _sequence,
    "scaling": _scaling,
    "generation": _generation,
}
