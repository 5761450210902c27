"""Zero-bubble, co-optimised pipeline parallelism for any LightningModule.

Importing the package registers the strategy: `Trainer(strategy="zero_bubble")`.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_zb.callback import ZeroBubbleCallback
from lightning_zb.strategy import ZeroBubbleStrategy

__version__ = "0.1.0"
__all__ = ["ZeroBubbleStrategy", "ZeroBubbleCallback"]

StrategyRegistry.register("zero_bubble", ZeroBubbleStrategy, description="Zero-bubble pipeline parallelism", override=True)
