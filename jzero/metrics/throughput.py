"""Tokens a second, and what share of the devices' peak that is."""

import time
from collections.abc import Callable

from jzero.metrics.rows import Row


class Throughput:
    """Tokens per second of wall time between finished steps.

    The first step only starts the clock, since it compiles. `restart` after anything that is not training
    leaves the time until then out.
    """

    def __init__(
        self,
        tokens_per_step: int,
        clock: Callable[[], float] = time.perf_counter,
        tokens_at_peak: float | None = None,
    ):
        """tokens_at_peak: tokens a second were all devices at their peak; None where that is not known."""
        self._tokens_per_step = tokens_per_step
        self._tokens_at_peak = tokens_at_peak
        self._clock = clock
        self._since: float | None = None
        self._tokens = 0
        self._seconds = 0.0

    def step_finished(self) -> Row:
        """`tokens_per_second` since the step before, None where there is none to measure from, and `mfu`, the same as
        a share of the peak, where that is known."""
        speed = self._measure()
        if self._tokens_at_peak is None:
            return {"tokens_per_second": speed}
        return {"tokens_per_second": speed, "mfu": None if speed is None else speed / self._tokens_at_peak}

    def restart(self) -> None:
        if self._since is not None:
            self._since = self._clock()

    @property
    def mean(self) -> float | None:
        """Tokens per second over all measured steps; None if there are none."""
        return self._tokens / self._seconds if self._seconds else None

    def _measure(self) -> float | None:
        now = self._clock()
        since, self._since = self._since, now
        if since is None or now <= since:
            return None
        self._tokens += self._tokens_per_step
        self._seconds += now - since
        return self._tokens_per_step / (now - since)
