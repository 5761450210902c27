"""`python -m lightning_zb`: the console script `lightning-zb`, where that is not on the path."""

import sys

from lightning_zb.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
