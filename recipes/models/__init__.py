"""Ordinary LightningModules for language modelling; nothing in them knows of pipelines.

Import from the modules: only `pretrained` needs the transformers library, which takes seconds to import.
"""
