"""Which devices take part in a collective together, and over which mesh axes those groups span.

XLA writes groups in three forms, and under axis names of its own, which it splits, merges and drops. So the groups are
worked out as sets of devices, numbered in the mesh's order, and compared with those of each set of mesh axes.
"""

import math
import re
from collections.abc import Mapping
from functools import cache
from itertools import combinations, pairwise
from typing import TypeAlias

import numpy as np

Groups: TypeAlias = frozenset[frozenset[int]]
Sizes: TypeAlias = tuple[tuple[str, int], ...]

_GROUPS = re.compile(
    r"\breplica_groups=(?:"
    r"mesh\[(?P<mesh>[^\]]*)\](?:, ?device_ids=\((?P<ids>[^)]*(?:\)[^){]*)?)\))? ?\{(?P<axes>[^}]*)\}"
    r"|(?P<iota>\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)"
    r"|\{(?P<list>(?:\{[\d,]*\},?)*)\})"
)
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_AXIS = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?(?:,|$)")
_IOTA = re.compile(r"^(?:\[([\d,]+)\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?$")


def spanned(text: str, sizes: Sizes) -> tuple[tuple[str, ...] | None, int]:
    """The mesh axes that the groups of an operation span (None: those of no set of axes), and how many devices a group
    has. text: the operation's line. sizes: of the mesh axes, in order."""
    match = _GROUPS.search(text) or _PAIRS.search(text)
    return _spanned(match[0] if match else "", sizes)


@cache
def _spanned(text: str, sizes: Sizes) -> tuple[tuple[str, ...] | None, int]:
    groups = device_groups(text, math.prod(size for _, size in sizes))
    named = [name for name, size in sizes if size > 1]
    chosen = (axes for count in range(len(named) + 1) for axes in combinations(named, count))
    axes = next((axes for axes in chosen if _along(axes, sizes) == groups), None)
    return axes, max(map(len, groups))


def device_groups(text: str, num_devices: int) -> Groups:
    """The devices that take part together, from an operation's `replica_groups` or `source_target_pairs`. Where neither
    is there, or none is named, all."""
    match = _GROUPS.search(text)
    if match and match["mesh"] is not None:
        return _mesh_groups(match["mesh"], match["ids"], match["axes"])
    if match and match["iota"]:
        return _groups(_iota(match["iota"]))
    if match and match["list"]:
        return frozenset(frozenset(_numbers(part)) for part in re.findall(r"\{([\d,]*)\}", match["list"]))
    if pairs := _PAIRS.search(text):
        return _joined([_numbers(part) for part in re.findall(r"\{([\d,]+)\}", pairs[1])], num_devices)
    return frozenset([frozenset(range(num_devices))])


def crossing(axes: tuple[str, ...], mesh_shape: Mapping[str, int], devices_per_node: int) -> bool:
    """Whether devices that differ along those axes alone lie on several nodes."""
    groups = _along(axes, tuple(mesh_shape.items()))
    return any(len({device // devices_per_node for device in group}) > 1 for group in groups)


@cache
def _along(axes: tuple[str, ...], sizes: Sizes) -> Groups:
    """The groups of devices that differ along those axes alone."""
    extents = [size for _, size in sizes]
    ids = np.arange(math.prod(extents)).reshape(extents)
    return _groups(_rows(ids, [at for at, (name, _) in enumerate(sizes) if name in axes]))


def _mesh_groups(mesh: str, ids: str | None, axes: str) -> Groups:
    """mesh: 'axis_0'=2,'axis_1'=4. ids: the devices in the order of the mesh, as an iota or one by one. axes:
    'axis_0','axis_1':(2)2, of which the second is the inner 2 of the axis after the outer 2."""
    extents = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", mesh)}
    order = np.arange(math.prod(extents.values())) if ids is None else _iota(ids).reshape(-1)
    parts: list[int] = []  # the mesh's extents, cut where axes are
    kept: list[int] = []
    for name, extent in extents.items():
        cuts = [(int(outer or 1), int(size or extent)) for other, outer, size in _AXIS.findall(axes) if other == name]
        edges = sorted({1, extent, *(edge for outer, size in cuts for edge in (outer, outer * size))})
        for low, high in pairwise(edges):
            if any(outer <= low < outer * size for outer, size in cuts):
                kept.append(len(parts))
            parts.append(high // low)
    return _groups(_rows(order.reshape(parts), kept))


def _iota(text: str) -> np.ndarray:
    """`[4,2]<=[2,4]T(1,0)`, `[2,4]T(1,0)`, or numbers."""
    match = _IOTA.match(text)
    if match is None:
        return np.array(_numbers(text))
    shape, source, turned = (_numbers(part) if part else None for part in match.groups())
    assert source is not None
    array = np.arange(math.prod(source)).reshape(source)
    array = array if turned is None else array.transpose(turned)
    return array if shape is None else array.reshape(shape)


def _rows(array: np.ndarray, last: list[int]) -> np.ndarray:
    """A matrix with a row for each index along the dims but `last`."""
    first = [dim for dim in range(array.ndim) if dim not in last]
    extent = math.prod(array.shape[dim] for dim in last)
    return array.transpose(*first, *last).reshape(-1, extent)


def _groups(rows: np.ndarray) -> Groups:
    return frozenset(frozenset(row) for row in rows.tolist())


def _joined(pairs: list[list[int]], num_devices: int) -> Groups:
    """Devices that pairs connect."""
    group = {device: {device} for device in range(num_devices)}
    for source, target in pairs:
        joined = group[source] | group[target]
        group |= dict.fromkeys(joined, joined)
    return frozenset(frozenset(members) for members in group.values())


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]
