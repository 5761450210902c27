"""Model states: what a device holds of parameters whatever the schedule, by optimizer, precision and post-validation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_zb.planning.costs import CostModel

_OPTIMIZER_COPIES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
_WIDTHS = {"fp32": 4.0, "32-true": 4.0, "bf16-mixed": 4.0, "16-mixed": 4.0, "bf16-true": 2.0, "16-true": 2.0}
"""Bytes of a parameter; mixed precision of Lightning keeps parameters, gradients and optimizer state in 32 bits."""

_CAST = 2.0  # bytes of the 16-bit copy of a parameter that autocast keeps while a microbatch is under way


@dataclass(frozen=True, slots=True)
class BytesPerParameter:
    """What one parameter takes up.

    Args:
        parameter: its value.
        gradient: its gradient.
        optimizer: its optimizer state.
        rollback: the copies that exact post-validation keeps of value and optimizer state.
        cast: the copy in 16 bits under mixed precision.
    """

    parameter: float
    gradient: float
    optimizer: float
    rollback: float
    cast: float

    @property
    def total(self) -> float:
        return self.parameter + self.gradient + self.optimizer + self.rollback + self.cast


def model_states(
    optimizer: str, precision: str = "fp32", exact_post_validation: bool = False, num_shards: int = 1
) -> BytesPerParameter:
    """The bytes that one parameter takes up.

    Args:
        optimizer: `sgd`, `momentum` (SGD with momentum), `adam` or `adamw`.
        precision: `fp32`, `bf16-mixed`, `16-mixed`, `bf16-true` or `16-true`, as Lightning means them.
        exact_post_validation: whether steps are taken before they are validated and undone from copies.
        num_shards: replicas among which optimizer state is divided, evenly (`ZeroBubbleStrategy(shard_optimizer=True)`
            divides whole parameters, so that one of them may hold somewhat more).

    Raises:
        ValueError: the optimizer or the precision is unknown, or nothing is divided among.
    """
    if num_shards < 1:
        raise ValueError(f"num_shards={num_shards} must be at least 1, which divides nothing")
    if optimizer not in _OPTIMIZER_COPIES:
        raise ValueError(f"optimizer {optimizer!r} is unknown; known are {', '.join(_OPTIMIZER_COPIES)}")
    if precision not in _WIDTHS:
        raise ValueError(f"precision {precision!r} is unknown; known are {', '.join(_WIDTHS)}")
    width, state = _WIDTHS[precision], _OPTIMIZER_COPIES[optimizer] * _WIDTHS[precision] / num_shards
    return BytesPerParameter(
        parameter=width,
        gradient=width,
        optimizer=state,
        rollback=width + state if exact_post_validation else 0.0,
        cast=_CAST if precision.endswith("mixed") else 0.0,
    )


def with_model_states(
    costs: CostModel,
    optimizer: str,
    precision: str = "fp32",
    exact_post_validation: bool = False,
    bytes_of_parameter: float | None = None,
    num_shards: int = 1,
) -> CostModel:
    """The costs with `state_bytes` of every item, from its `parameter_bytes`.

    Args:
        costs: say how many bytes the parameters of each item have.
        optimizer: as in `model_states`; so are the next two.
        precision: see there.
        exact_post_validation: see there.
        bytes_of_parameter: what a parameter has in `parameter_bytes`; None: as many as in this precision.
        num_shards: as in `model_states`.

    Raises:
        ValueError: the optimizer or the precision is unknown.
    """
    each = model_states(optimizer, precision, exact_post_validation, num_shards)
    factor = each.total / (each.parameter if bytes_of_parameter is None else bytes_of_parameter)
    return replace(costs, layers=tuple(replace(c, state_bytes=factor * c.parameter_bytes) for c in costs.layers))
