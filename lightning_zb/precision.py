"""Precision: what Lightning's plugins do, with clipping and the optimizer step handed to the pipeline.

Lightning builds the plugin from `Trainer(precision=...)`; the strategy adopts it, so every precision string works as
before. Clipping needs the norm of the whole model, and a step may be held until it is validated: both are the
pipeline's decision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision


class StepFinisher(Protocol):
    """What the plugin asks of the strategy at the end of a step."""

    def clip(self, optimizer: Any, max_value: float, algorithm: str) -> None:
        """Clip the gradients of the whole model, or note that they are to be clipped."""
        ...

    def finish_step(self, optimizer: Any) -> None:
        """Update the parameters of this device, now or when the step is validated."""
        ...


class ZeroBubblePrecision(Precision):
    """32-true, and the base of the others."""

    pipeline: StepFinisher

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Clip by the norm over all devices (`norm`) or element by element (`value`)."""
        if clip_val is not None and clip_val > 0:
            self.pipeline.clip(
                optimizer, float(clip_val), str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm))
            )

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the step's passes and hooks, then let the pipeline step.

        `optimizer.step(closure)` cannot hold a step back, so the closure runs first, as Lightning does with a scaler.
        """
        result = closure()
        scaler = scaler_of(self)
        if scaler is not None:
            scaler.unscale_(optimizer)  # before the hooks and clipping see gradients, as Lightning does
        self._after_closure(model, optimizer)
        self.pipeline.finish_step(optimizer)
        return result


class ZeroBubbleMixedPrecision(ZeroBubblePrecision, MixedPrecision):
    """bf16-mixed and 16-mixed.

    An optimizer that unscales within its step (`fused=True`) gets gradients that are unscaled already: the same bits,
    since scales are powers of two.
    """

    __qualname__ = MixedPrecision.__qualname__  # under which Lightning saves the scaler: the plain Trainer's checkpoints


class ZeroBubbleHalfPrecision(ZeroBubblePrecision, HalfPrecision):
    """bf16-true."""


_ADOPTED: dict[type[Precision], type[ZeroBubblePrecision]] = {
    Precision: ZeroBubblePrecision,
    MixedPrecision: ZeroBubbleMixedPrecision,
    HalfPrecision: ZeroBubbleHalfPrecision,
}


def adopt(plugin: Precision, pipeline: StepFinisher) -> ZeroBubblePrecision:
    """Turn the plugin that Lightning built into ours, keeping its state.

    Raises:
        ValueError: a precision that a pipeline does not support.
    """
    if not isinstance(plugin, ZeroBubblePrecision):
        if type(plugin) not in _ADOPTED or str(plugin.precision) not in ("32-true", "bf16-true", "bf16-mixed", "16-mixed"):
            raise ValueError(
                f"precision {plugin.precision!r} is not supported by the zero_bubble strategy; "
                "use '32-true', 'bf16-true', 'bf16-mixed' or '16-mixed'"
            )
        plugin.__class__ = _ADOPTED[type(plugin)]
    assert isinstance(plugin, ZeroBubblePrecision)
    plugin.pipeline = pipeline
    return plugin


def scaler_of(plugin: Precision) -> torch.amp.GradScaler | None:
    """The plugin's loss scaler, if its precision needs one and nobody switched it off."""
    scaler: torch.amp.GradScaler | None = getattr(plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None
