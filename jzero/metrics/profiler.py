"""A trace of some steps, for TensorBoard's profiler, XProf or Perfetto."""

from pathlib import Path
from typing import Any

import jax


class ProfilerWindow:
    """Traces the steps of a range into `directory`/plugins/profile/<time>, evaluations and saves between them too.

    A run that goes on within the range traces the rest of it, one that goes on beyond it traces nothing.
    """

    def __init__(self, directory: Path, steps: range):
        self._directory = directory
        self._steps = steps
        self._tracing = False

    def step_begins(self, step: int) -> None:
        if step in self._steps and not self._tracing:
            jax.profiler.start_trace(self._directory)
            self._tracing = True

    def step_ends(self, step: int, results: Any) -> None:
        """results: the step's arrays; the trace ends when the devices are done with the last ones."""
        if self._tracing and step + 1 not in self._steps:
            jax.block_until_ready(results)
            self.close()

    def close(self) -> None:
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
