"""Write costs files of the nine configurations, for the command line.

    python -m recipes.costs gemma-small deepseek-large --tokens 4096 --out costs

writes `costs/gemma-small-4096.json` and so on; without names, all nine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_zb.planning.planfile import write_costs
from recipes.costs.models import CONFIGURATIONS


def main(argv: list[str] | None = None) -> None:
    """Write the files and print what the models weigh."""
    parser = argparse.ArgumentParser(description="costs files of Gemma, DeepSeek and Nemotron-H from an analytic model")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CONFIGURATIONS)}; default all")
    parser.add_argument("--tokens", type=int, default=4096, help="of a microbatch, which is one sequence")
    parser.add_argument("--out", type=Path, default=Path("costs"), help="folder")
    arguments = parser.parse_args(argv)
    unknown = sorted(set(arguments.names) - set(CONFIGURATIONS))
    if unknown:
        parser.error(f"{', '.join(unknown)}: unknown; known are {', '.join(CONFIGURATIONS)}")
    if arguments.tokens < 1:
        parser.error(f"--tokens {arguments.tokens}: write 1 or more")
    arguments.out.mkdir(parents=True, exist_ok=True)
    print("configuration        items  parameters (1e9)  F (ms)  B (ms)  W (ms)  head / mean item")
    for name in arguments.names or CONFIGURATIONS:
        config = CONFIGURATIONS[name]
        costs = config.costs(arguments.tokens)
        write_costs(costs, arguments.out / f"{name}-{arguments.tokens}.json")
        times = [1e3 * sum(getattr(c, part) for c in costs.layers) for part in ("forward", "backward_input", "backward_weight")]
        stacked = [c.work for c in costs.layers[1:-1]]
        ratio = costs.layers[-1].work / (sum(stacked) / len(stacked))
        parameters = sum(item.parameters for item in config.items(config, arguments.tokens, 8)) / 1e9
        columns = "  ".join(f"{t:>6.1f}" for t in times)
        print(f"{name:<20} {len(costs.layers):>5} {parameters:>17.2f}  {columns} {ratio:>17.1f}")


if __name__ == "__main__":
    main()
