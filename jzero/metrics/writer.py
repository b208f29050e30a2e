"""Rows on their way to the sinks."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jzero.metrics.memory import memory_in_use
from jzero.metrics.rows import DurableSink, Row, Sink
from jzero.metrics.throughput import Throughput


class MetricWriter:
    """Hands rows to the sinks in order, training rows one step late.

    Reading a device scalar waits for its step. So `write_step` holds the new row back and finishes the one
    before it, while the device already works on the new step. `flush` finishes the held row; call it before
    anything that relies on it being written (a checkpoint of that step, an evaluation). `close` flushes
    too. The sinks are closed by whoever opened them.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        throughput: Throughput,
        leaves: Sequence[str] = (),
        memory_every: int | None = None,
    ):
        """leaves: names behind the number `non_finite_leaf`; no sink gets it, the row handed back does, and
        `loss_scale_exhausted` where it is so.
        memory_every: steps between rows that say what memory is in use; the first says it too."""
        self._sinks = sinks
        self._leaves = leaves
        self._throughput = throughput
        self._memory_every = memory_every
        self._held: Row | None = None

    def write_step(self, step: int, metrics: Mapping[str, jax.Array]) -> Row | None:
        """Takes the device arrays of `step`; returns the finished row of the step before, if it was held."""
        held, self._held = self._held, {"step": step, **metrics}
        return self._finish(held)

    def flush(self) -> Row | None:
        """Waits for the held step; returns its finished row, None if none was held."""
        held, self._held = self._held, None
        return self._finish(held)

    def sync(self) -> None:
        """Waits until the rows written so far are on the disk."""
        for sink in self._sinks:
            if isinstance(sink, DurableSink):
                sink.sync()

    def write(self, row: Row) -> None:
        """Passes on a row of host scalars, after the one that is held."""
        self.flush()
        self._pass_on(row)

    def close(self) -> None:
        self.flush()

    def _finish(self, held: Row | None) -> Row | None:
        if held is None:
            return None
        # In lists, since JAX would sort a dict by its keys.
        values = jax.device_get(list(held.values()))
        row = {name: np.asarray(value).tolist() for name, value in zip(held, values, strict=True)}
        row |= self._throughput.step_finished()
        first = row["tokens_per_second"] is None
        if self._memory_every and (first or row["step"] % self._memory_every == 0):
            row |= memory_in_use()
        broken, exhausted = row.pop("non_finite_leaf", -1), row.pop("loss_scale_exhausted", False)
        self._pass_on(row)
        told = {"non_finite_leaf": self._leaves[broken]} if broken >= 0 else {}
        return row | told | ({"loss_scale_exhausted": True} if exhausted else {})

    def _pass_on(self, row: Row) -> None:
        for sink in self._sinks:
            try:
                sink.write(row)
            except Exception as error:
                error.add_note(f"{type(sink).__name__} could not take the row of step {row['step']}")
                raise
