"""Zero-bubble, co-optimised pipeline parallelism for any LightningModule.

Importing the package registers the strategy: `Trainer(strategy="zero_bubble")`. Torch and Lightning, which take seconds to
import, are left to those who use them: planning and the command line do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_zb.registration import register_with_lightning

if TYPE_CHECKING:
    from lightning_zb.callback import ZeroBubbleCallback
    from lightning_zb.strategy import ZeroBubbleStrategy

__version__ = "0.1.0"
__all__ = ["ZeroBubbleStrategy", "ZeroBubbleCallback"]

register_with_lightning()


def __getattr__(name: str) -> Any:
    """The public classes, imported when they are first asked for (PEP 562)."""
    if name == "ZeroBubbleStrategy":
        from lightning_zb.strategy import ZeroBubbleStrategy as found
    elif name == "ZeroBubbleCallback":
        from lightning_zb.callback import ZeroBubbleCallback as found  # type: ignore[assignment]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
