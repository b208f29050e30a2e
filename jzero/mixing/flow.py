"""What a value is of the batch it was computed from: a polynomial in sums over the rows of the batch.

x - mean(x) is a row's own value and a sum, total / count a sum over a sum. Here is the arithmetic of such polynomials,
and where in an array the rows lie.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any


class Effect(Enum):
    """What a value is of the batch, in one word."""

    INDEPENDENT = "the same whatever the batch"
    ROWS = "an array of the batch: each row comes of that row alone"
    SUM = "a sum over rows, times what is independent"
    SHIFTED = "such a sum, and something independent added"
    MIXED = "certainly no sum over rows: rows meet, or a sum is squared, divided by, ..."
    UNKNOWN = "cannot be told"


@dataclass(frozen=True)
class Term:
    """A product of anything independent, one row's own values (`rows`), and `up` sums over the rows, divided by `down`.

    clipped: one of the sums is a sum only where nothing cuts it off, as in max(count, 1).
    """

    rows: bool = False
    up: int = 0
    down: int = 0
    clipped: bool = False

    @property
    def effect(self) -> Effect:
        if not self.up and not self.down:
            return Effect.ROWS if self.rows else Effect.INDEPENDENT
        if self == SUM:
            return Effect.SUM
        # total / count * count is a sum again; that the two counts are the same is not followed.
        may_cancel = self.down > 0 and self.rows + self.up - self.down == 1
        return Effect.UNKNOWN if may_cancel or self.clipped else Effect.MIXED


class Lump(Enum):
    """A value that is no polynomial."""

    UNKNOWN = "unknown"
    MIXED = "a function of sums, or of several rows at once"
    PAIRED = "rows of one dim plus rows of another: mixed, but the sum of it all is one over rows again"

    @property
    def effect(self) -> Effect:
        return Effect.UNKNOWN if self is Lump.UNKNOWN else Effect.MIXED


Terms = frozenset[Term | Lump]
CONSTANT, ROW, SUM = Term(), Term(rows=True), Term(up=1)
MOST_SUMS = 4  # in a term. No model multiplies more; a loop might, without end


@dataclass(frozen=True)
class Layout:
    """Where the rows lie: dim `dim` is [any number, rows, inner], flat. packed: by a reshape, tokens with the rows."""

    dim: int
    inner: int
    rows: int
    packed: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Flow:
    """What a value is of the batch: the sum of `terms`; of none, zero.

    layout: where the rows lie, if they do. uneven: dims along which its elements differ, so that some may lack terms.
    value: of a scalar that follows from numbers in the program, that scalar. where: for MIXED, the equation that did
    it, as "div at model.py:12:8 (loss)".
    """

    terms: Terms
    layout: Layout | None = None
    uneven: frozenset[int] = frozenset()
    value: Any = None
    where: str = field(default="", compare=False)

    @property
    def effect(self) -> Effect:
        effects = {term.effect for term in self.terms}
        if Effect.MIXED in effects or Effect.UNKNOWN in effects:
            return Effect.MIXED if Effect.MIXED in effects else Effect.UNKNOWN
        if Effect.SUM in effects:
            return {1: Effect.SUM, 2: Effect.SHIFTED}[len(effects)] if Effect.ROWS not in effects else Effect.MIXED
        return Effect.ROWS if Effect.ROWS in effects else Effect.INDEPENDENT

    @property
    def constant(self) -> bool:
        return self.terms <= {CONSTANT}

    @property
    def separate(self) -> bool:
        """Nothing of it comes of more than one row."""
        return self.terms <= {CONSTANT, ROW}

    @property
    def mixed_throughout(self) -> bool:
        """Any elements of it are mixed, whatever is done to them."""
        return Lump.MIXED in self.terms and not self.uneven


INDEPENDENT, ZERO = Flow(frozenset({CONSTANT})), Flow(frozenset())
UNKNOWN, MIXED, PAIRED = (Flow(frozenset({lump})) for lump in Lump)


def number(value: Any) -> Flow:
    return Flow(ZERO.terms if value == 0 else INDEPENDENT.terms, value=value)


# Arithmetic.


def union(flows: Iterable[Flow]) -> Terms:
    return Terms().union(*(flow.terms for flow in flows))


def product(a: Flow, b: Flow) -> Terms:
    return frozenset(_times(s, t) for s in a.terms for t in b.terms)


def _times(a: Term | Lump, b: Term | Lump) -> Term | Lump:
    if isinstance(a, Term) and isinstance(b, Term):
        term = Term(a.rows or b.rows, a.up + b.up, a.down + b.down, a.clipped or b.clipped)
        return Lump.UNKNOWN if max(term.up, term.down) > MOST_SUMS else term
    if Lump.MIXED not in (a, b):
        if Lump.UNKNOWN in (a, b):
            return Lump.UNKNOWN
        if CONSTANT in (a, b):
            return Lump.PAIRED
    return Lump.MIXED


def linear(flow: Flow) -> Flow:
    return flow


def nonlinear(flow: Flow) -> Flow:
    if flow.effect is Effect.MIXED:
        terms = MIXED.terms
    elif Lump.UNKNOWN in flow.terms:
        terms = UNKNOWN.terms
    else:
        terms = (flow.terms or INDEPENDENT.terms) if flow.separate else MIXED.terms
    return replace(flow, terms=terms)


def clipped(flow: Flow) -> Flow:
    """Of a function that may leave a sum as it is: max(count, 1), abs(total)."""
    if flow.effect is Effect.MIXED and (flow.layout or Lump.PAIRED in flow.terms):
        return nonlinear(flow)
    terms = (replace(t, clipped=True) if isinstance(t, Term) and t.effect is Effect.SUM else t for t in flow.terms)
    return replace(flow, terms=frozenset(terms) or INDEPENDENT.terms)


def inverse(flow: Flow) -> Flow:
    """1 / flow."""
    factors = [t for t in flow.terms if isinstance(t, Term) and t != CONSTANT]
    only_terms = all(isinstance(t, Term) for t in flow.terms)
    if flow.separate or not only_terms or (flow.layout and len(factors) > 1):
        return nonlinear(flow)
    if len(flow.terms) == 1:
        (factor,) = factors
        return replace(flow, terms=frozenset({Term(factor.rows, factor.down, factor.up)}))
    return replace(flow, terms=frozenset({Term(any(t.rows for t in factors), 0, 1)}))


def summed(flow: Flow, axes: Iterable[int]) -> Flow:
    """The sum over axes; its dims keep their numbers."""
    axes = set(axes)
    over_rows = flow.layout is not None and flow.layout.dim in axes

    def total(term: Term | Lump) -> Term | Lump:
        if over_rows and isinstance(term, Term) and term.rows:
            return replace(term, rows=False, up=term.up + 1)
        return Lump.UNKNOWN if term is Lump.PAIRED else term

    layout = None if over_rows else flow.layout
    return replace(reduced(flow, axes), terms=frozenset(map(total, flow.terms)), layout=layout)


def reduced(flow: Flow, axes: Iterable[int]) -> Flow:
    """One value of all elements along axes has the terms of all."""
    return replace(flow, uneven=frozenset()) if flow.uneven & set(axes) else flow


# Elements beside one another.


def aligned(flows: Sequence[Flow], terms: Terms, meeting: Flow) -> Flow:
    """Arrays of one shape combined to `terms`, element by element. meeting: what comes of rows of different dims."""
    layouts = {flow.layout for flow in flows if flow.layout}
    throughout = any(flow.mixed_throughout for flow in flows)
    uneven = frozenset[int]() if throughout else frozenset[int]().union(*(flow.uneven for flow in flows))
    if len(layouts) <= 1:
        return Flow(terms, next(iter(layouts), None), uneven)
    if throughout:
        return MIXED
    dims = {layout.dim for layout in layouts}
    if len(dims) == 1 or Lump.UNKNOWN in terms:
        return UNKNOWN
    return met(layouts, replace(meeting, uneven=uneven | dims))


def met(layouts: Iterable[Layout], meeting: Flow) -> Flow:
    # Packed attention lets all tokens meet, and its mask keeps every row to itself.
    return UNKNOWN if any(layout.packed for layout in layouts) else meeting


def beside(flows: Sequence[Flow], dims: Iterable[int]) -> Flow:
    """Some elements from one, some from another; dims: along which they change."""
    layouts = {flow.layout for flow in flows if flow.layout}
    if len(layouts) > 1:
        return UNKNOWN
    differ = len({flow.terms - {CONSTANT, ROW} for flow in flows}) > 1
    uneven = frozenset[int]().union(*(flow.uneven for flow in flows), dims if differ else ())
    return Flow(union(flows), next(iter(layouts), None), uneven)


def either(flows: Sequence[Flow]) -> Flow:
    """One or the other, by what is independent of the batch."""
    if all(flow.separate for flow in flows):
        return beside(flows, ())
    if flows[0].effect is not Effect.MIXED:
        flows = [flow for flow in flows if flow.terms]  # a sum or zero is a sum
    return flows[0] if all(flow == flows[0] for flow in flows) else UNKNOWN


def lost(flow: Flow) -> Flow:
    """Of something that cannot be followed."""
    return MIXED if flow.mixed_throughout else UNKNOWN


def picked(flow: Flow, dims: Iterable[int]) -> Flow:
    """Some of the elements along each of these dims."""
    return UNKNOWN if flow.uneven & set(dims) else flow


def moved(flow: Flow, places: Mapping[int, int]) -> Flow:
    """places: dim -> its new number; a dim that is missing goes, and holds no rows."""
    layout = flow.layout and replace(flow.layout, dim=places[flow.layout.dim])
    return replace(flow, layout=layout, uneven=frozenset(places[d] for d in flow.uneven if d in places))


def without(ndim: int, axes: Iterable[int]) -> dict[int, int]:
    """The places of an array's dims once axes are gone."""
    axes = set(axes)
    return {dim: new for new, dim in enumerate(d for d in range(ndim) if d not in axes)}


def settled(flow: Flow, where: str) -> Flow:
    """In the one form that a value has. where: kept if it is mixed."""
    if flow.constant:
        return flow
    terms = flow.terms
    if Lump.MIXED in terms:
        terms = MIXED.terms
    elif Lump.UNKNOWN in terms:
        terms = frozenset(t for t in terms if t.effect is Effect.MIXED) | UNKNOWN.terms
    elif ROW in terms:
        terms -= {CONSTANT}  # a row's own value and a number is a row's own value
    layout = flow.layout if any(isinstance(t, Term) and t.rows for t in terms) else None
    uneven = flow.uneven if terms - {CONSTANT, ROW, Lump.UNKNOWN} else frozenset()
    return Flow(terms, layout, uneven, where=where if flow.effect is Effect.MIXED else "")
