"""A run directory: what lies where, whose run it is, and from which step that run goes on."""

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jzero.config import Config, dump_config, load_config, make_config
from jzero.errors import CheckpointError, ConfigError
from jzero.files import replacing
from jzero.manifest import BrokenStepError, Manifest, assert_intact, complete_steps, listing, step_numbers

logger = logging.getLogger(__name__)

# A run is its model, data, optimizer, precision and seed, less the settings that only say how it is computed.
# Placement, batch size and length may change from one start to the next.
IDENTITY_SECTIONS = ("model", "data", "optimizer", "precision")
NOT_IDENTITY = {
    "model.family",  # its fields say it all
    "model.remat",
    "model.attention",
    "data.cache_dir",
    "data.num_workers",
    "data.prefetch_batches",
    "precision.preset",
    # What one changes to save a run that went wrong.
    "optimizer.learning_rate",
    "optimizer.final_learning_rate",
    "optimizer.decay_steps",  # to keep the schedule's end where num_steps moved
    "optimizer.clip_norm",
}
IDENTITY_FIELDS = (
    "train.seed",
    "train.frozen",
    "train.ema_decay",
    "loss_scale.dynamic",
    "loss_scale.initial",
    "checkpoint.start_from",
    "checkpoint.start_averaged",
    "checkpoint.start_skip",
)


@dataclass(frozen=True)
class RunDirectory:
    """Names the files of a run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / str(step)


def open_run_directory(run_dir: str) -> RunDirectory:
    """Makes the directory where it is missing. Raises ConfigError if it cannot be made or written to."""
    path = Path(run_dir).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"train.run_dir={run_dir!r} cannot be a directory: {error}; name another") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"train.run_dir={run_dir!r} cannot be written to; change its permissions or name another")
    return RunDirectory(path)


@contextmanager
def locked(directory: RunDirectory) -> Iterator[None]:
    """Holds the directory for this process. The system lets go of it, however the process ends.

    Raises CheckpointError, naming the process, if another one holds it.
    """
    with assert_usable(directory):
        file = open(directory.lock, "a+")  # noqa: SIM115
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise CheckpointError(
                f"train.run_dir={str(directory.path)!r} is in use by {file.read() or 'another process'}; "
                "wait for its end, stop it, or name another train.run_dir"
            ) from None
        except OSError as error:
            logger.warning("%s cannot be locked (%s): let no second process train there", directory.path, error)
        else:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        yield


@contextmanager
def assert_usable(directory: RunDirectory) -> Iterator[None]:
    """Raises ConfigError if opening a file of the run within fails by what lies in the directory."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        raise ConfigError(
            f"train.run_dir={str(directory.path)!r} cannot be used: {error}; mend that, or name another train.run_dir"
        ) from error


def write_config(directory: RunDirectory, config: Config) -> None:
    """Writes the resolved config, as it is from this start on."""
    with replacing(directory.config) as file:
        file.write(dump_config(config).encode())


def find_start(config: Config, directory: RunDirectory) -> int | None:
    """The step of the checkpoint to go on from, None to start anew, by `checkpoint.resume`. Touches nothing.

    Raises CheckpointError where the policy forbids what is there, and for a directory that holds another run.
    """
    policy, run_dir = config.checkpoint.resume, config.train.run_dir
    present, complete = step_numbers(directory.checkpoints), _complete(config, directory)
    latest = max(complete, default=None)
    steps = listing(present)
    if policy == "never" and present:
        raise CheckpointError(
            f"checkpoint.resume=never, but train.run_dir={run_dir!r} holds checkpoints (steps {steps}); "
            "name another train.run_dir, or set checkpoint.resume=auto to go on from the last"
        )
    if present and latest is None:
        raise CheckpointError(
            f"train.run_dir={run_dir!r} holds only damaged checkpoints (steps {steps}); bring one back, "
            f"or delete {directory.checkpoints} to start anew"
        )
    if policy == "must" and latest is None:
        raise CheckpointError(
            f"checkpoint.resume=must, but train.run_dir={run_dir!r} holds no complete checkpoint; "
            "name the run's directory, or set checkpoint.resume=auto to start where there is none"
        )
    earlier = _earlier_config(directory, None if latest is None else complete[latest].record)
    differences = [] if earlier is None else find_differences(earlier, config)
    if differences:
        raise CheckpointError(
            f"train.run_dir={run_dir!r} holds another run; name another directory, or undo what differs:\n"
            + "\n".join(f"  {line}" for line in differences)
        )
    return latest


def _complete(config: Config, directory: RunDirectory) -> dict[int, Manifest]:
    """The complete checkpoints. One that would end the run at once is read through: none but its checksums speak up."""
    complete = complete_steps(directory.checkpoints)
    for step in sorted(complete, reverse=True):
        if step < config.train.num_steps:
            break
        try:
            assert_intact(directory.checkpoints, complete[step])
            break
        except BrokenStepError as error:
            logger.warning("%s; passed over", error)
            del complete[step]
    return complete


def find_differences(earlier: Config, now: Config) -> list[str]:
    """One line for each setting that makes `now` another run than `earlier`; none if it is the same run."""
    before, after = _identity(earlier), _identity(now)
    return [
        f"{name}: {before[name]!r} in the directory, {after[name]!r} now"
        for name in after
        if before[name] != after[name]
    ]


def _identity(config: Config) -> dict[str, Any]:
    sections = config.model_dump(mode="json")
    fields = {f"{section}.{name}": value for section, group in sections.items() for name, value in group.items()}
    named = [name for name in fields if name.partition(".")[0] in IDENTITY_SECTIONS and name not in NOT_IDENTITY]
    return {name: fields[name] for name in [*named, *IDENTITY_FIELDS]}


def _earlier_config(directory: RunDirectory, record: dict[str, Any] | None) -> Config | None:
    """What the directory's run was started with: by its checkpoint, or by its config.yaml before there is
    one.
    """
    try:
        if record is not None:
            return make_config(record["config"])
        return load_config(directory.config) if directory.config.exists() else None
    except (ConfigError, KeyError) as error:
        raise CheckpointError(
            f"train.run_dir={str(directory.path)!r} holds a run whose settings cannot be read here "
            f"(another version of jzero wrote them?); name another train.run_dir: {error}"
        ) from error
