"""Files that a kill or a power cut at any moment leaves whole: written aside, on the disk before they get their name.

Also JSON that knows whether it was altered: `{..., "crc32": 123, "record": {...}}`.
"""

import errno
import json
import os
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


class DamagedError(Exception):
    """A file that is cut short, altered or gone; the message names it. Whoever reads it says what follows."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends, or vanishes when it raises.

    Processes that write one path at once write a file each. The last to finish stays, always a whole file.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems know no such thing for folders
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_checked(path: Path, name: str, content: dict[str, Any], **head: Any) -> None:
    """Writes `content` (JSON) under `name`, after `head` and its checksum."""
    checksum = zlib.crc32(json.dumps(content).encode())
    with replacing(path) as file:
        file.write(json.dumps({**head, "crc32": checksum, name: content}).encode() + b"\n")


def read_checked(path: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content under `name` that `write_checked` wrote, and all that stands beside it.

    Raises FileNotFoundError, another OSError if it cannot be read, or DamagedError.
    """
    text = path.read_bytes()
    try:
        head = json.loads(text)
        content, checksum = head.pop(name), head["crc32"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path.name} cannot be read ({error})") from error
    if zlib.crc32(json.dumps(content).encode()) != checksum:
        raise DamagedError(f"{path.name} was altered (its checksum is not {checksum})")
    return content, head
