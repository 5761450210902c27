"""The command line `lightning-zb`: plan, simulate, compare, show and export pipelines from costs files, without a GPU."""

from lightning_zb.cli.entry import main

__all__ = ["main"]
