"""Zero-bubble, co-optimised pipeline parallelism for any LightningModule."""

__version__ = "0.1.0"
