"""Step folders on disk: which are complete, which intact, and what is in them. Knows neither JAX nor Orbax.

    <directory>/JZERO_CHECKPOINTS    says that the directory is ours
    <directory>/<step>/              one folder a step; its data files are the writer's business
    <directory>/<step>/jzero.json    its manifest, with the size and CRC-32 of every data file

A step is written as `<step>.saving`, gets its manifest last (`seal`) and is then renamed (`publish`). So a killed
process leaves no half step behind, and what befalls a step later, a missing, cut or altered file, is found by its
manifest. A sealed `<step>.saving` without a `<step>` is that step: readers take it, the next save gives it its name.
"""

import logging
import re
import shutil
import tempfile
import uuid
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jzero.errors import CheckpointError
from jzero.files import DamagedError, read_checked, sync, write_checked

logger = logging.getLogger(__name__)

FORMAT = 1
MARKER = "JZERO_CHECKPOINTS"
MANIFEST = "jzero.json"
SAVING, DELETING = ".saving", ".deleting"
_ORBAX_FILES = {"_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "checkpoint"}
_CHUNK_BYTES = 1 << 24


class BrokenStepError(Exception):
    """A step folder that is incomplete or damaged; the message says where and what."""


@dataclass(frozen=True)
class ArrayEntry:
    """shape: the true shape. dtype: its name. key_impl: the generator's name if these are typed PRNG keys."""

    shape: tuple[int, ...]
    dtype: str
    key_impl: str | None = None


@dataclass(frozen=True)
class Manifest:
    """What a step holds. files: {path within the folder: (bytes, CRC-32)}, filled in by `seal`."""

    step: int
    eval_loss: float | None
    arrays: dict[str, ArrayEntry]
    record: dict[str, Any]
    files: dict[str, tuple[int, int]] = field(default_factory=dict)


def claim(directory: Path) -> None:
    """Makes the directory and marks it as ours; CheckpointError if that fails or it holds other checkpoints."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        assert_ours(directory)
        with tempfile.TemporaryFile(dir=directory):
            pass
        (directory / MARKER).write_text("Checkpoints written by jzero, one folder a step.\n")
    except OSError as error:
        raise _unusable(directory, error, "Give a directory that can be made and written.") from error


def assert_readable(directory: Path) -> None:
    """CheckpointError unless the directory is there and may hold checkpoints of ours. Writes nothing."""
    try:
        assert_ours(directory)
    except OSError as error:
        raise _unusable(directory, error, "Give a directory that holds checkpoints.") from error


def _unusable(directory: Path, error: OSError, fix: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint directory {directory} cannot be used: {error.strerror} ({error.filename}). {fix}"
    )


def assert_ours(directory: Path) -> None:
    """CheckpointError if the directory holds checkpoints of another program, or is a step."""
    names = {path.name for path in directory.iterdir()}
    if MARKER in names:
        return
    if MANIFEST in names:
        raise CheckpointError(f"{directory} is one step of a checkpoint directory; give its parent {directory.parent}")
    steps = {name for name in names if _is_step(name) and not (directory / name / MANIFEST).exists()}
    if foreign := sorted(steps | names & _ORBAX_FILES):
        raise CheckpointError(
            f"{directory} holds checkpoints that jzero did not write ({listing(foreign)}). Give another directory."
        )


def _is_step(name: str) -> bool:
    return re.fullmatch(r"0|[1-9][0-9]*", name) is not None


def step_numbers(directory: Path) -> list[int]:
    """The numbers of all steps, broken ones too, in order."""
    names = {path.name.removesuffix(SAVING) for path in directory.glob("[0-9]*")}
    steps = sorted(int(name) for name in names if _is_step(name))
    return [step for step in steps if step_folder(directory, step).exists()]


def step_folder(directory: Path, step: int) -> Path:
    """The folder of a step, which need not be there: `<step>`, or a complete one that a kill kept from that name."""
    final, saving = directory / str(step), directory / f"{step}{SAVING}"
    if final.exists() or not (saving / MANIFEST).exists():
        return final
    try:
        _read_manifest(saving, step, f"step {step} of {directory}")
    except BrokenStepError:
        return final
    return saving


def complete_steps(directory: Path) -> dict[int, Manifest]:
    """The manifests of the steps whose files are all there with the right sizes, in order. Reads no data."""
    complete = {}
    for step in step_numbers(directory):
        try:
            complete[step] = read_manifest(directory, step)
        except BrokenStepError:
            continue
    return complete


def read_manifest(directory: Path, step: int) -> Manifest:
    """The manifest of a complete step; BrokenStepError if it is not there or a file of it is missing or cut."""
    return _read_manifest(step_folder(directory, step), step, f"step {step} of {directory}")


def _read_manifest(folder: Path, step: int, where: str) -> Manifest:
    if not folder.exists():
        raise BrokenStepError(f"{where} is not there")
    try:
        manifest, head = read_checked(folder / MANIFEST, "manifest")
    except FileNotFoundError:
        raise BrokenStepError(f"{where} is incomplete: it has no {MANIFEST}") from None
    except OSError as error:
        raise BrokenStepError(f"{where} is damaged: {MANIFEST} cannot be read ({error})") from error
    except DamagedError as error:
        raise BrokenStepError(f"{where} is damaged: {error}") from error
    if head.get("format") != FORMAT:
        raise CheckpointError(
            f"{where} has format {head.get('format')}; this jzero reads format {FORMAT}: use the one that wrote it"
        )
    if manifest["step"] != step:
        raise BrokenStepError(f"{where} was renamed: its {MANIFEST} is that of step {manifest['step']}")
    for name, (size, _) in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise BrokenStepError(f"{where} is incomplete: {name} is missing")
        if path.stat().st_size != size:
            raise BrokenStepError(f"{where} is damaged: {name} has {path.stat().st_size} bytes instead of {size}")
    manifest["arrays"] = {
        name: ArrayEntry(tuple(entry["shape"]), entry["dtype"], entry["key_impl"])
        for name, entry in manifest["arrays"].items()
    }
    return Manifest(**manifest)


def assert_intact(directory: Path, manifest: Manifest) -> None:
    """Reads every data file of a step; BrokenStepError if one was altered."""
    files = _read_files(step_folder(directory, manifest.step))
    for name, (_, checksum) in manifest.files.items():
        if name not in files or files[name][1] != checksum:
            raise BrokenStepError(
                f"step {manifest.step} of {directory} is damaged: {name} was altered (checksum differs)"
            )


def seal(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest with the checksums of the files now in `folder`, which must not change any more.

    All of it is on the disk before the manifest is.
    """
    with ThreadPoolExecutor() as pool:
        list(pool.map(sync, [*folder.rglob("*"), folder]))
    sealed = replace(manifest, files=_read_files(folder))
    write_checked(folder / MANIFEST, "manifest", asdict(sealed), format=FORMAT)


def publish(directory: Path, step: int) -> None:
    """Gives a sealed step its name. One that has it is deleted only then: a kill at any moment leaves a whole step."""
    final = directory / str(step)
    replaced = _set_aside(final) if final.exists() else None
    (directory / f"{step}{SAVING}").rename(final)
    sync(directory)
    if replaced is not None:
        _remove(replaced)


def _read_files(folder: Path) -> dict[str, tuple[int, int]]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST]
    with ThreadPoolExecutor() as pool:  # zlib lets go of the GIL
        return {
            str(path.relative_to(folder)): found for path, found in zip(paths, pool.map(_read_file, paths), strict=True)
        }


def _read_file(path: Path) -> tuple[int, int]:
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return size, checksum


def delete(folder: Path) -> None:
    """Deletes a folder, or logs a warning: what is too much on the disk spoils no run.

    It is renamed first, so that an interrupted deletion leaves no step with half its files.
    """
    try:
        doomed = _set_aside(folder)
    except OSError as error:
        logger.warning("%s could not be deleted: %s. Delete it by hand.", folder, error)
    else:
        _remove(doomed)


def _set_aside(folder: Path) -> Path:
    doomed = folder.with_name(folder.name + DELETING)
    if doomed.exists():  # could not be deleted before
        doomed = folder.with_name(f"{doomed.name}.{uuid.uuid4().hex}")
    return folder.rename(doomed)


def _remove(doomed: Path) -> None:
    try:
        shutil.rmtree(doomed) if doomed.is_dir() else doomed.unlink()
    except OSError as error:
        logger.warning("%s could not be deleted: %s. Delete it by hand.", doomed, error)


def clear_leftovers(directory: Path) -> None:
    """Gives complete steps their names that a kill kept from them, and deletes what else interrupted saves and
    deletions left. Steps stay, broken ones too.
    """
    for step in step_numbers(directory):
        if step_folder(directory, step).name.endswith(SAVING):
            publish(directory, step)
    for suffix in (SAVING, DELETING):
        for path in directory.glob(f"[0-9]*{suffix}*"):
            shutil.rmtree(path, ignore_errors=True)


def retained(eval_losses: Mapping[int, float | None], keep_last: int | None, keep_best: int | None) -> set[int]:
    """Of {step: eval loss} the steps to keep: the `keep_last` newest and the `keep_best` of lowest loss; None: all.

    Of equal losses the later step counts; without a loss a step is never best. The newest always stays.
    """
    newest = sorted(eval_losses, reverse=True)[: None if keep_last is None else max(keep_last, 1)]
    by_loss = sorted((loss, -step) for step, loss in eval_losses.items() if loss is not None)
    return {*newest, *(-step for _, step in by_loss[:keep_best])}


def listing(items: Sequence[object], separator: str = ", ", most: int = 12) -> str:
    """The first items in one string; of the rest only how many they are."""
    more = [f"and {len(items) - most} more"] if len(items) > most else []
    return separator.join([*map(str, items[:most]), *more])
