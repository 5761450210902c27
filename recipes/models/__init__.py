"""Ordinary LightningModules for language modelling; nothing in them knows of pipelines."""

from recipes.models.language_model import LanguageModel
from recipes.models.pretrained import TransformersLanguageModel
from recipes.models.sequential import SequentialLanguageModel

__all__ = ["LanguageModel", "SequentialLanguageModel", "TransformersLanguageModel"]
