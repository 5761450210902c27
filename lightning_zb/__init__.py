"""Zero-bubble, co-optimised pipeline parallelism for any LightningModule.

Importing the package registers the strategy: `Trainer(strategy="zero_bubble")`. Torch and Lightning, which take seconds to
import, are left to those who use them: planning and the command line do not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_zb.registration import register_with_lightning

if TYPE_CHECKING:
    from lightning_zb import profiling, sharded_checkpoint
    from lightning_zb.callback import ZeroBubbleCallback
    from lightning_zb.strategy import ZeroBubbleStrategy

__version__ = "0.1.0"
__all__ = ["ZeroBubbleStrategy", "ZeroBubbleCallback", "profiling", "sharded_checkpoint"]

_CLASSES = {"ZeroBubbleStrategy": "lightning_zb.strategy", "ZeroBubbleCallback": "lightning_zb.callback"}
_MODULES = ("profiling", "sharded_checkpoint")

register_with_lightning()


def __getattr__(name: str) -> Any:
    """What is public, imported when it is first asked for (PEP 562)."""
    if name in _CLASSES:
        globals()[name] = getattr(import_module(_CLASSES[name]), name)
        return globals()[name]
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
