"""Text as bytes: a Lightning data module and where its text comes from."""

from recipes.data.bytes_module import ByteDataModule
from recipes.data.corpus import Corpus, read_folder, read_standard_library

__all__ = ["ByteDataModule", "Corpus", "read_folder", "read_standard_library"]
