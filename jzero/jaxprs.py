"""Reading JAX programs before compilation."""

from collections.abc import Iterator

from jax.extend import core, source_info_util

Program = core.ClosedJaxpr | core.Jaxpr


def equations(program: Program) -> Iterator[core.JaxprEqn]:
    """Every equation of a program, each followed by those of the programs it holds (jit, scan, cond, ...)."""
    for equation in own_equations(program):
        yield equation
        for inner in subprograms(equation):
            yield from equations(inner)


def own_equations(program: Program) -> list[core.JaxprEqn]:
    """A program's own equations, without those of the programs they hold."""
    return opened(program).eqns


def opened(program: Program) -> core.Jaxpr:
    """A program without its constants."""
    return program.jaxpr if isinstance(program, core.ClosedJaxpr) else program


def source_line(equation: core.JaxprEqn) -> str:
    """Where the user's code makes an equation, as "model.py:12:8 (loss)"; empty where only JAX's own does."""
    return source_info_util.summarize(equation.source_info)


def replace_equations(program: Program, new: list[core.JaxprEqn]) -> Program:
    """The program with other equations of its own."""
    if isinstance(program, core.Jaxpr):
        return program.replace(eqns=new)
    return program.replace(jaxpr=program.jaxpr.replace(eqns=new))


def subprograms(equation: core.JaxprEqn) -> list[Program]:
    """The programs among an equation's parameters."""
    values = [v for p in equation.params.values() for v in (p if isinstance(p, tuple | list) else (p,))]
    return [v for v in values if isinstance(v, Program)]


def scan_operands(equation: core.JaxprEqn) -> tuple[int, int]:
    """How many constants, and then how many carries, a scan's operands begin with; the rest it goes through."""
    params = equation.params
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carries, _ = params["ft_in"].unpack()  # from jax 0.12 on
    return len(consts), len(carries)
