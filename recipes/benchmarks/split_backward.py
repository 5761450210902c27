"""What the split backward costs: F, B and W of a chunk against plain autograd, in CPU time of one thread.

    python -m recipes.benchmarks.split_backward

"overhead only" chunks have tensors of a few bytes, so the ratio is the price of Python per operator; the others are real sizes.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zb.execution.split_backward import DeferredWeights, accumulate


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def run_plain(chunk: nn.Module, x: Tensor, gradient: Tensor) -> list[float]:
    """Seconds of F, of the backward, and zero."""
    times = [time.process_time()]
    output = chunk(x.detach().requires_grad_())
    times.append(time.process_time())
    torch.autograd.backward(output, gradient)
    times.append(time.process_time())
    return [times[1] - times[0], times[2] - times[1], 0.0]


def run_split(chunk: nn.Module, x: Tensor, gradient: Tensor) -> list[float]:
    """Seconds of F, B and W."""
    times = [time.process_time()]
    record = DeferredWeights()
    with record.recording():
        output = chunk(x.detach().requires_grad_())
    times.append(time.process_time())
    with record.recording():
        torch.autograd.backward(output, gradient)
    times.append(time.process_time())
    accumulate(record.contributions())
    times.append(time.process_time())
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def compare(
    num_layers: int, width: int, batch: int, length: int, dtype: torch.dtype, num_rounds: int, autocast: bool, keep: bool
) -> None:
    """Print the medians of interleaved rounds, and the ratio of their sums."""
    torch.manual_seed(0)
    chunk = nn.Sequential(*(Block(width, max(1, width // 64)) for _ in range(num_layers))).to(dtype)
    x = torch.randn(batch, length, width, dtype=dtype)
    gradient = torch.randn_like(x)
    rounds: dict[str, list[list[float]]] = {"plain": [], "split": []}
    for index in range(num_rounds + 2):
        for name, run in (("plain", run_plain), ("split", run_split)):
            if not keep or index == 0:
                chunk.zero_grad()
            gc.disable()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                times = run(chunk, x, gradient)
            gc.enable()
            if index >= 2:
                rounds[name].append(times)
    medians = {name: [statistics.median(column) * 1e3 for column in zip(*times, strict=True)] for name, times in rounds.items()}
    ratio = sum(medians["split"]) / sum(medians["plain"])
    label = f"{num_layers:3d} layers, width {width}, batch {batch}, length {length}, {dtype}".replace("torch.", "")
    plain, split = medians["plain"], medians["split"]
    print(
        f"{label + (', autocast' if autocast else '') + (', accumulating' if keep else ''):66s}"
        f" plain F {plain[0]:8.3f} bw {plain[1]:8.3f} | split F {split[0]:8.3f} B {split[1]:8.3f} W {split[2]:8.3f} ms"
        f" | ratio {ratio:.3f}",
        flush=True,
    )


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the small chunks only")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    print("overhead only")
    for num_layers in (1, 4, 8, 16, 32, 64):
        compare(num_layers, 8, 1, 2, torch.float32, 60 if num_layers < 32 else 25, autocast=False, keep=False)
    compare(16, 8, 1, 2, torch.float32, 40, autocast=False, keep=True)
    compare(16, 8, 1, 2, torch.float32, 40, autocast=True, keep=False)
    if quick:
        return
    print("real sizes")
    compare(4, 256, 4, 128, torch.float32, 15, autocast=False, keep=False)
    compare(4, 256, 4, 128, torch.float32, 15, autocast=False, keep=True)
    compare(4, 512, 2, 128, torch.float32, 9, autocast=False, keep=False)
    compare(4, 512, 2, 128, torch.bfloat16, 9, autocast=False, keep=False)
    compare(4, 256, 4, 128, torch.float32, 9, autocast=True, keep=False)


if __name__ == "__main__":
    main()
