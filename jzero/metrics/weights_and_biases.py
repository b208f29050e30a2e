"""Rows for Weights & Biases (wandb.ai)."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jzero.errors import ConfigError
from jzero.gradstats import HISTOGRAM_EDGES
from jzero.metrics.rows import Row

logger = logging.getLogger(__name__)


class WandbSink:
    """One run at W&B for all starts of a run directory; its id lies in wandb/run_id there.

    project: its name, or entity/name. config: shown beside the run. The environment says the rest, as for any program
    with wandb: WANDB_MODE=offline leaves the rows in `directory`/wandb for `wandb sync`, WANDB_NAME is the run's name.

    W&B takes no step twice: of steps done again after a resumption it keeps what it has. Should it fail while the run
    goes on, a warning says so once and the run goes on without. Raises ConfigError if it cannot be started.
    """

    def __init__(self, project: str, directory: Path, config: Mapping[str, Any], start_step: int = 0):
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"log.wandb = {project}: needs the package wandb, which is not installed; pip install wandb"
            ) from error
        entity, _, name = project.rpartition("/")
        id_file = directory / "wandb" / "run_id"
        known = start_step > 0 and id_file.exists()
        self._wandb = wandb
        self._lost = False
        try:
            self._run = wandb.init(
                project=name,
                entity=entity or None,
                id=id_file.read_text() if known else None,
                resume="allow",
                dir=str(directory),
                config=dict(config),
                settings=wandb.Settings(console="off"),  # it would come between the console and the progress bar
            )
        except (wandb.Error, OSError) as error:
            told = str(error).rstrip(".")
            raise ConfigError(
                f"log.wandb = {project}: W&B cannot be started: {told}; run `wandb login`, set WANDB_MODE=offline "
                "to keep the rows here for `wandb sync`, or leave log.wandb out"
            ) from error
        id_file.parent.mkdir(exist_ok=True)
        id_file.write_text(self._run.id)

    def write(self, row: Row) -> None:
        if row["step"] < self._run.starting_step:
            return
        values = {name: self._content(value) for name, value in row.items() if name != "step" and value is not None}
        self._attempt(lambda: self._run.log(values, step=row["step"]))

    def close(self) -> None:
        self._attempt(self._run.finish)

    def _content(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return self._wandb.Histogram(np_histogram=(np.array(value), np.array(HISTOGRAM_EDGES)))

    def _attempt(self, act: Callable[[], Any]) -> None:
        if self._lost:
            return
        try:
            act()
        except Exception as error:  # whatever befalls its service is no reason to stop training
            self._lost = True
            logger.warning("W&B takes no more rows (%s); the run goes on, metrics.jsonl has them all", error)
