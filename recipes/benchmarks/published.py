"""Profiled costs and bubble rates that others published: the rows of the planner's benchmark."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lightning_zb.planning.costs import CostModel, LayerCost, Link


@dataclass(frozen=True, slots=True)
class Row:
    """One profiled model: milliseconds of a whole stage, bytes per token and layer.

    Args:
        model: its size.
        stages: devices of the pipeline.
        microbatches: of a step.
        forward, backward_input, backward_weight, communication: milliseconds.
        activation, weight_stash: M_B and M_W.
        public: schedule, least memory budget and bubble rate of what is published or public code makes of these costs.
    """

    model: str
    stages: int
    microbatches: int
    forward: float
    backward_input: float
    backward_weight: float
    communication: float
    activation: int
    weight_stash: int
    public: tuple[tuple[str, float, float], ...] = field(default=())

    @property
    def name(self) -> str:
        return f"{self.model} P={self.stages} m={self.microbatches}"

    def costs(self, layers_per_stage: int) -> CostModel:
        """The cost model with each stage split evenly into layers."""
        layer = LayerCost(
            name="layer",
            forward=self.forward / layers_per_stage / 1e3,
            backward_input=self.backward_input / layers_per_stage / 1e3,
            backward_weight=self.backward_weight / layers_per_stage / 1e3,
            activation_bytes=self.activation / layers_per_stage,
            weight_stash_bytes=self.weight_stash / layers_per_stage,
        )
        return CostModel((layer,) * (self.stages * layers_per_stage), Link(latency=self.communication / 1e3))

    def best_public(self, budget: float) -> tuple[str, float] | None:
        """The least public bubble rate within a budget, and whose it is."""
        within = [(bubble, name) for name, least, bubble in self.public if least <= budget + 1e-9]
        return None if not within else (min(within)[1], min(within)[0])


_LEAST = {"v-min": {8: 4, 16: 6, 32: 12}, "v-half": {8: 5, 16: 9, 32: 17}}  # measured peaks in M_B


_SIZES = {"1.5B": (201216, 73728), "6.2B": (303104, 131072), "14.6B": (378880, 163840), "28.3B": (454656, 196608)}


def _stage_row(
    model: str,
    stages: int,
    microbatches: int,
    times: tuple[float, float, float, float],
    zb: tuple[float, float],
    zb_v: float,
    v_half: float,
    v_min: float,
    more_memory: tuple[tuple[float, float], ...] = (),
) -> Row:
    controlled = [(name, _LEAST[name][stages] / stages, rate) for name, rate in (("v-min", v_min), ("v-half", v_half))]
    public = (*controlled, ("zb-1p", 1.0, zb[0]), ("zb-2p", 2.0, zb[1]), ("zb-v", 1.0, zb_v))
    more = (("zb-v", budget, rate) for budget, rate in more_memory)
    return Row(model, stages, microbatches, *times, *_SIZES[model], (*public, *more))


# Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024): times from Table 6, memory from Table 1, zb-1p and zb-2p from
# Table 5. zb-v, v-half and v-min: what the authors' public scheduler (github.com/sail-sg/zero-bubble-pipeline-parallelism)
# makes of these times, timed by an independent simulator; where it was also run with more memory, that follows.
STAGE_ROWS = (
    _stage_row("1.5B", 8, 24, (18.522, 18.086, 9.337, 0.601), (0.1585, 0.0433), 0.0703, 0.1702, 0.3353,
               ((1.25, 0.0331), (1.5, 0.0128), (2.0, 0.0076))),
    _stage_row("1.5B", 8, 32, (18.513, 18.086, 9.331, 0.626), (0.1242, 0.0039), 0.0543, 0.1339, 0.3103),
    _stage_row("1.5B", 8, 64, (18.546, 18.097, 9.321, 0.762), (0.0674, 0.0026), 0.0298, 0.0737, 0.2758,
               ((1.25, 0.0158), (1.5, 0.0057), (2.0, 0.0031))),
    _stage_row("6.2B", 8, 24, (29.718, 29.444, 19.927, 0.527), (0.1323, 0.0029), 0.0403, 0.1447, 0.2721),
    _stage_row("6.2B", 8, 32, (29.802, 29.428, 19.530, 0.577), (0.1045, 0.0022), 0.0326, 0.1145, 0.2496),
    _stage_row("6.2B", 8, 64, (29.935, 29.621, 19.388, 0.535), (0.0554, 0.0010), 0.0166, 0.0607, 0.2013,
               ((1.25, 0.0062), (1.5, 0.0024), (2.0, 0.0015))),
    _stage_row("14.6B", 16, 48, (11.347, 11.248, 8.132, 0.377), (0.1397, 0.0066), 0.0498, 0.1682, 0.2927),
    _stage_row("14.6B", 16, 64, (11.307, 11.254, 8.101, 0.379), (0.1088, 0.0054), 0.0381, 0.1318, 0.2615,
               ((1.25, 0.0138), (1.5, 0.0027), (2.0, 0.0027))),
    _stage_row("14.6B", 16, 128, (11.325, 11.308, 8.109, 0.378), (0.0576, 0.0028), 0.0195, 0.0706, 0.2085),
    _stage_row("28.3B", 32, 96, (10.419, 10.207, 7.715, 0.408), (0.1421, 0.0038), 0.0531, 0.1780, 0.3027),
    _stage_row("28.3B", 32, 128, (10.408, 10.204, 7.703, 0.408), (0.1106, 0.0029), 0.0404, 0.1398, 0.2712,
               ((1.25, 0.0141), (1.5, 0.0014), (2.0, 0.0014))),
    _stage_row("28.3B", 32, 256, (10.402, 10.248, 7.698, 0.460), (0.0594, 0.0018), 0.0220, 0.0765, 0.2242),
)  # fmt: skip


def _chunk_row(model: str, stages: int, microbatches: int, times: tuple[float, float, float, float], zb_v: float) -> Row:
    forward, backward, weight, communication = times
    public = (("zb-v", 1.0, zb_v),)
    return Row(model, stages, microbatches, 2 * forward, 2 * backward, 2 * weight, communication, *_SIZES[model], public)


# The authors' script for ZB-V (arXiv 2401.10241, branch arxiv, efficiency.py): milliseconds of a chunk, two to a stage, and
# the bubble rate of zb-v that it prints.
CHUNK_ROWS = (
    _chunk_row("6.2B", 16, 48, (14.407, 14.380, 9.676, 1.610), 0.0697),
    _chunk_row("6.2B", 16, 64, (14.412, 14.393, 9.688, 1.621), 0.0533),
    _chunk_row("6.2B", 16, 128, (14.316, 14.306, 9.639, 1.619), 0.0274),
    _chunk_row("14.6B", 24, 72, (6.763, 6.969, 5.251, 0.755), 0.0638),
    _chunk_row("14.6B", 24, 96, (6.783, 6.984, 5.259, 0.758), 0.0483),
    _chunk_row("14.6B", 24, 192, (6.785, 6.990, 5.260, 0.770), 0.0250),
    _chunk_row("28.3B", 32, 96, (9.458, 9.748, 7.288, 0.879), 0.0593),
    _chunk_row("28.3B", 32, 128, (9.469, 9.744, 7.306, 0.892), 0.0451),
    _chunk_row("28.3B", 32, 256, (9.447, 9.644, 7.193, 0.887), 0.0236),
)

# Fewer microbatches than devices or as many, the costs of the first 6.2B and 1.5B rows; zb and zb-v by the public scheduler.
FEW_ROWS = tuple(
    replace(STAGE_ROWS[number], microbatches=m, public=public)
    for number, m, public in (
        (3, 8, (("zb", 1.0, 0.308), ("zb-v", 1.0, 0.156))),
        (3, 4, (("zb-v", 1.0, 0.463),)),
        (0, 8, ()),
        (0, 4, ()),
    )
)
