"""Partition, placement and schedule of a pipeline searched together (second paper, section Design)."""

from lightning_zb.planning.cooptimize.cut_rules import CutRules, cut_rules
from lightning_zb.planning.cooptimize.optimize import DEFAULT_EFFORT, cooptimize
from lightning_zb.planning.cooptimize.phases import ALL_PHASES, Phase

__all__ = ["ALL_PHASES", "DEFAULT_EFFORT", "CutRules", "Phase", "cooptimize", "cut_rules"]
