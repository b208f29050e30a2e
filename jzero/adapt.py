"""Which adapter drives the model a user brings."""

from typing import Any

from flax import linen, nnx

from jzero.errors import ModelError
from jzero.model_api import Model
from jzero.model_function import Function, adapt_function
from jzero.model_linen import Linen, adapt_linen
from jzero.model_nnx import adapt_builder, adapt_built


def adapt(model: Any) -> Model:
    """A Model of what the user brings. Raises ModelError for what jzero cannot drive."""
    if isinstance(model, nnx.Module):
        return adapt_built(model)
    if isinstance(model, Linen):
        return adapt_linen(model)
    if isinstance(model, Function):
        return adapt_function(model)
    if isinstance(model, linen.Module):
        raise ModelError(
            f"model is the Flax Linen module {type(model).__name__}: say what it is called with, as in "
            "jzero.Linen(module, inputs=(example,))."
        )
    if callable(model) and not isinstance(model, type):
        return adapt_builder(model)
    raise ModelError(
        f"model is {model!r}: give a Flax NNX module, a function of nnx.Rngs that builds one such as "
        "lambda rngs: MyModel(rngs=rngs), a jzero.Linen(module, inputs=...) or a jzero.Function(init, apply)."
    )
