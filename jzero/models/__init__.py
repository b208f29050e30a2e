"""Models to train out of the box. A model of your own needs nothing from here."""

from jzero.models.build import build_model
from jzero.models.generate import generate
from jzero.models.layers import stack_layers, unstack_layers

__all__ = ["build_model", "generate", "stack_layers", "unstack_layers"]
