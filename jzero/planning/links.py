"""Which links the transfers of a step run over, and for how long."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from jzero.hardware import Cluster
from jzero.mesh import AXES
from jzero.traffic import Transfer


@dataclass(frozen=True)
class Traffic:
    """What one device sends in a step. seconds: None where a bandwidth is not known."""

    elements: int
    intra_bytes: int
    inter_bytes: int
    seconds: float | None

    @property
    def bytes(self) -> int:
        return self.intra_bytes + self.inter_bytes


def traffic(transfers: Iterable[Transfer], axis_sizes: Mapping[str, int], cluster: Cluster) -> Traffic:
    """Transfers as rings, of which every network card of a node carries its share: of what a device sends, as large a
    part crosses nodes as hops of the ring do. The slower of the two links sets the pace. Latency is left out."""
    elements, intra, inter = Fraction(), 0, 0
    seconds: float | None = 0.0
    shares: dict[tuple[str, ...], float] = {}
    for transfer in transfers:
        if transfer.axes not in shares:
            shares[transfer.axes] = crossing_share(transfer.axes, axis_sizes, cluster.devices_per_node)
        sent = round(transfer.sent_bytes)
        across = round(sent * shares[transfer.axes])
        elements, intra, inter = elements + transfer.sent_elements, intra + sent - across, inter + across
        longest = _seconds(sent - across, across, cluster)
        seconds = None if seconds is None or longest is None else seconds + longest
    return Traffic(round(elements), intra, inter, seconds)


def crossing_share(axes: tuple[str, ...], axis_sizes: Mapping[str, int], devices_per_node: int) -> float:
    """The share of the hops of a ring over those mesh axes that lead to another node; of the worst ring."""
    sizes = [axis_sizes.get(axis, 1) for axis in AXES]
    nodes = np.arange(math.prod(sizes)).reshape(sizes) // devices_per_node
    along = [number for number, axis in enumerate(AXES) if axis in axes]
    rings = np.moveaxis(nodes, along, range(-len(along), 0)).reshape(-1, math.prod(sizes[d] for d in along))
    return float((rings != np.roll(rings, 1, axis=1)).mean(axis=1).max())


def _seconds(within: int, across: int, cluster: Cluster) -> float | None:
    hardware = cluster.hardware
    parts = [(within, hardware.intra_bandwidth), (across, hardware.inter_bandwidth)]
    if any(sent and not bandwidth for sent, bandwidth in parts):
        return None
    return max((sent / bandwidth for sent, bandwidth in parts if bandwidth), default=0.0)
