"""Anima text-to-image in plain torch: the model, its files, and a pipeline that needs no ComfyUI."""

__version__ = "0.1.0"
