"""The names that parts of a training step bear: in the program as traced, by the name stacks of its equations, and in
the compiled one, by the metadata of its operations."""

import re
from typing import Literal

from jzero.jaxprs import Program, own_equations

# At a use point, with the parameter's path in brackets; all that computes gradients, with the engine; the loop over
# micro-batches.
GATHER, SCATTER = "jzero_gather", "jzero_scatter"
GRADIENTS = "jzero_gradients"
MICRO_BATCHES = "jzero_micro_batches"

Engine = Literal["xla", "explicit"]
Phase = Literal["forward", "backward", "update"]

# What jax.jit calls an argument of the step: state.params['blocks/up/kernel'].
_PARAMETER = re.compile(r"^state\.params\[\\?'(.*?)\\?'\]$")
_POINT = re.compile(rf"({GATHER}|{SCATTER})\[([^\]]*)\]")


def scope(part: str, name: str) -> str:
    """What to call `jax.named_scope` with."""
    return f"{part}[{name}]"


def use_points(names: str) -> list[tuple[str, str]]:
    """(GATHER or SCATTER, path of the parameter) of each use point in a stack of names, outermost first."""
    return _POINT.findall(names)


def parameter_read(name: str) -> str | None:
    """The path of the parameter whose argument an operation is named after: XLA of jax 0.12 calls a gather so."""
    found = _PARAMETER.match(name)
    return found[1] if found else None


def without_paths(names: str) -> str:
    """The stack of names, its use points without their parameters."""
    return _POINT.sub(r"\1", names)


def is_backward(names: str) -> bool:
    """Whether a stack of names is of the backward pass, what it computes again included."""
    return SCATTER in names or "transpose(" in names or "rematted_computation" in names


def traced_engine(program: Program) -> Engine:
    """The engine that computes the gradients of a traced step."""
    explicit = scope(GRADIENTS, "explicit")
    found = any(explicit in str(equation.source_info.name_stack) for equation in own_equations(program))
    return "explicit" if found else "xla"
