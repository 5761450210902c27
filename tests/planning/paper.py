"""Profiled costs and bubble rates of Zero Bubble Pipeline Parallelism, in the form that tests need."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zb.planning.costs import CostModel, LayerCost, Link

# Milliseconds per stage, ICLR 2024 Table 6 (Table 9 of the arXiv text): model, P, m, T_F, T_B, T_W, T_comm; then hidden size
# and heads (Table 3), which give M_B = 34h + 5as and M_W = 32h per token and layer at s = 1024 (Table 1), and layers.
_PROFILED = (
    ("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601, 2304, 24, 22),
    ("1.5B", 8, 32, 18.513, 18.086, 9.331, 0.626, 2304, 24, 22),
    ("1.5B", 8, 64, 18.546, 18.097, 9.321, 0.762, 2304, 24, 22),
    ("6.2B", 8, 24, 29.718, 29.444, 19.927, 0.527, 4096, 32, 30),
    ("6.2B", 8, 32, 29.802, 29.428, 19.530, 0.577, 4096, 32, 30),
    ("6.2B", 8, 64, 29.935, 29.621, 19.388, 0.535, 4096, 32, 30),
    ("14.6B", 16, 48, 11.347, 11.248, 8.132, 0.377, 5120, 40, 46),
    ("14.6B", 16, 64, 11.307, 11.254, 8.101, 0.379, 5120, 40, 46),
    ("14.6B", 16, 128, 11.325, 11.308, 8.109, 0.378, 5120, 40, 46),
    ("28.3B", 32, 96, 10.419, 10.207, 7.715, 0.408, 6144, 48, 62),
    ("28.3B", 32, 128, 10.408, 10.204, 7.703, 0.408, 6144, 48, 62),
    ("28.3B", 32, 256, 10.402, 10.248, 7.698, 0.460, 6144, 48, 62),
)

# Table 5: bubble rates of 1f1b, zb-h1, zb-h2, zb-1p, zb-2p.
_BUBBLES = (
    (0.2431, 0.1585, 0.1083, 0.1585, 0.0433),
    (0.1985, 0.1242, 0.0837, 0.1242, 0.0039),
    (0.1240, 0.0674, 0.0444, 0.0674, 0.0026),
    (0.2347, 0.1323, 0.0698, 0.1323, 0.0029),
    (0.1898, 0.1045, 0.0559, 0.1045, 0.0022),
    (0.1091, 0.0554, 0.0294, 0.0554, 0.0010),
    (0.2552, 0.1397, 0.0672, 0.1397, 0.0066),
    (0.2082, 0.1088, 0.0516, 0.1088, 0.0054),
    (0.1251, 0.0576, 0.0266, 0.0576, 0.0028),
    (0.2646, 0.1421, 0.0641, 0.1421, 0.0038),
    (0.2168, 0.1106, 0.0490, 0.1106, 0.0029),
    (0.1352, 0.0594, 0.0257, 0.0594, 0.0018),
)

# The authors' zb-v on the costs above at 1.0 P x M_B, and interleaved with floor((layers + 2) / P) chunks per device and
# the link from the last to the first device charged always (the paper charges it once per group).
_RECOMPUTED = (
    (0.070271, 0.108968),
    (0.054310, 0.084676),
    (0.029797, 0.046142),
    (0.040320, 0.082679),
    (0.032649, 0.064443),
    (0.016642, 0.032797),
    (0.049829, 0.113628),
    (0.038111, 0.087824),
    (0.019456, 0.045886),
    (0.053099, 0.152796),
    (0.040436, 0.119158),
    (0.021987, 0.064138),
)

# The public v-half and v-min (the authors' greedy reordering of arXiv 2405.15362) on the costs above, and their peaks in M_B.
V_HALF_PEAK = {8: 5, 16: 9, 32: 17}
V_MIN_PEAK = {8: 4, 16: 6, 32: 12}
_CONTROLLED = (
    (0.170151, 0.335264),
    (0.133903, 0.310344),
    (0.073731, 0.275758),
    (0.144651, 0.272085),
    (0.114511, 0.249582),
    (0.060698, 0.201267),
    (0.168185, 0.292658),
    (0.131833, 0.261480),
    (0.070559, 0.208535),
    (0.177970, 0.302665),
    (0.139755, 0.271250),
    (0.076472, 0.224193),
)

# Appendix of the arXiv text, ZB-V: microseconds per chunk with two chunks per device (P, m, F, B, W, comm, M_B, M_W), and the
# bubble rate of zb-v at 1.0 P x M_B.
ZB_V_ROWS = (
    (16, 48, 14407, 14380, 9676, 1610, 303104, 131072, 0.0697),
    (16, 64, 14412, 14393, 9688, 1621, 303104, 131072, 0.0533),
    (16, 128, 14316, 14306, 9639, 1619, 303104, 131072, 0.0274),
    (24, 72, 6763, 6969, 5251, 755, 378880, 163840, 0.0638),
    (24, 96, 6783, 6984, 5259, 758, 378880, 163840, 0.0483),
    (24, 192, 6785, 6990, 5260, 770, 378880, 163840, 0.0250),
    (32, 96, 9458, 9748, 7288, 879, 454656, 196608, 0.0593),
    (32, 128, 9469, 9744, 7306, 892, 454656, 196608, 0.0451),
    (32, 256, 9447, 9644, 7193, 887, 454656, 196608, 0.0236),
)


# Section 6.1, arXiv text: the models above on P devices with one layer per chunk. Table 6: samples per GPU and second at equal
# memory and global batch, where zb-2p runs twice the m at half the microbatch size; its m = 64 and 96 rows are completed from
# the right column of Table 7.
EQUAL_MEMORY = {
    (16, 48): {"zb-v": 4.15, "zb-2p": 4.36, "zb-1p": 3.87, "1f1b": 3.38},
    (16, 64): {"zb-v": 4.21, "zb-2p": 4.37, "zb-1p": 4.00, "1f1b": 3.57},
    (16, 128): {"zb-v": 4.35, "zb-2p": 4.45},
    (24, 72): {"zb-v": 1.85, "zb-2p": 1.84, "zb-1p": 1.72, "1f1b": 1.52},
    (24, 96): {"zb-v": 1.88, "zb-2p": 1.84, "zb-1p": 1.78, "1f1b": 1.61},
    (32, 96): {"zb-v": 1.01, "zb-2p": 1.00},
    (32, 128): {"zb-v": 1.02, "zb-1p": 0.97, "1f1b": 0.87},
}

# Table 7: what twice the microbatch size gains at the same number of microbatches.
TWICE_THE_SIZE = {
    (16, 64): {"zb-v": 0.0194, "zb-1p": 0.0230, "1f1b": 0.0259},
    (24, 96): {"zb-v": 0.0743, "zb-1p": 0.0788, "1f1b": 0.0952},
    (32, 128): {"zb-v": 0.0632, "zb-1p": 0.0556, "1f1b": 0.0875},
}


def size_costs(num_devices: int, num_microbatches: int, half: bool) -> CostModel:
    """One layer per chunk, two chunks per device, at the microbatch size of section 6.1 or at half of it.

    The larger size is `ZB_V_ROWS`; the smaller one is what Table 9 gives for the same model at that size, per layer, with
    half the transfer time.
    """
    forward, backward, weight, comm, activation, stash, _ = next(
        row[2:] for row in ZB_V_ROWS if row[:2] == (num_devices, num_microbatches)
    )
    times = [t / 1e6 for t in (forward, backward, weight, comm)]
    if half:
        name = {16: "6.2B", 24: "14.6B", 32: "28.3B"}[num_devices]
        row = next(r for r in ROWS if r.name.startswith(name))
        layers_per_stage = (row.num_layers + 2) / row.num_devices
        times = [t / 1e3 / layers_per_stage for t in row.times] + [times[3] / 2]
        activation, stash = activation / 2, stash / 2
    layer = (*times[:3], activation, stash)
    return CostModel(tuple(LayerCost(f"{i}", *layer) for i in range(2 * num_devices)), Link(times[3]))


@dataclass(frozen=True)
class Row:
    """One row of the paper's tables: costs of a stage in seconds and bytes, and the bubble rates known for it."""

    name: str
    num_devices: int
    num_microbatches: int
    times: tuple[float, float, float]
    comm: float
    stash_ratio: float
    num_layers: int
    bubbles: dict[str, float]

    def costs(self, layers_per_stage: int = 1) -> CostModel:
        """Each stage cut into equal layers; M_B of a stage is 1."""
        v = layers_per_stage
        layer = [t / v for t in self.times]
        return CostModel(
            tuple(
                LayerCost(f"{i}", *layer, activation_bytes=1 / v, weight_stash_bytes=self.stash_ratio / v)
                for i in range(self.num_devices * v)
            ),
            Link(latency=self.comm),
        )


_NAMES = ("1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-v", "interleaved", "v-half", "v-min")
ROWS = tuple(
    Row(
        f"{name}-{m}",
        num_devices,
        m,
        (f, b, w),
        comm,
        32 * hidden / (34 * hidden + 5 * heads * 1024),
        num_layers,
        dict(zip(_NAMES, paper + recomputed + controlled, strict=True)),
    )
    for (name, num_devices, m, f, b, w, comm, hidden, heads, num_layers), paper, recomputed, controlled in zip(
        _PROFILED, _BUBBLES, _RECOMPUTED, _CONTROLLED, strict=True
    )
)


def unit_costs(num_devices: int, layers_per_stage: int = 1) -> CostModel:
    """F = B = W = 1 per stage, no link cost; M_B = 1, M_W = 0.4 as in transformers."""
    v = layers_per_stage
    return CostModel(tuple(LayerCost(f"{i}", 1 / v, 1 / v, 1 / v, 1 / v, 0.4 / v) for i in range(num_devices * v)))
