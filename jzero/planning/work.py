"""How much arithmetic a traced program is."""

import math
from typing import Any

from jax.extend import core
from jax.extend.core import primitives

from jzero.jaxprs import Program, own_equations, subprograms


def product_flops(program: Program, num_shards: int) -> float:
    """FLOPs of the matrix products and convolutions that one device runs, those of recomputation included.

    num_shards: devices that share the rows of a batch; under `jax.shard_map` shapes are of one device already. A loop
    whose length the program does not say counts once, and of branches the one with most work.
    """
    return sum(_flops(equation, num_shards) for equation in own_equations(program))


def _flops(equation: core.JaxprEqn, num_shards: int) -> float:
    primitive, params = equation.primitive, equation.params
    shapes: list[Any] = [getattr(operand.aval, "shape", ()) for operand in equation.invars]
    if primitive is primitives.dot_general_p:
        (contracted, _), _ = params["dimension_numbers"]
        return 2.0 * math.prod(shapes[0][d] for d in contracted) * _size(equation) / num_shards
    if primitive is primitives.conv_general_dilated_p:
        kernel, outputs = shapes[1], params["dimension_numbers"].rhs_spec[0]
        return 2.0 * math.prod(kernel) / kernel[outputs] * _size(equation) / num_shards
    inner = [
        product_flops(program, 1 if primitive.name == "shard_map" else num_shards) for program in subprograms(equation)
    ]
    if primitive is primitives.cond_p:
        return max(inner)
    return sum(inner) * (params["length"] if primitive is primitives.scan_p else 1)


def _size(equation: Any) -> int:
    return math.prod(equation.outvars[0].aval.shape)
