"""Which line of the user's program an operation of a compiled one comes from."""

import re
from pathlib import Path

_FRAME_ID = re.compile(r"\bstack_frame_id=(\d+)")
_ENTRY = re.compile(r"^(\d+) (.*)$")
_LIBRARY = Path(__file__).parent.parent


class Frames:
    """The tables of files and lines at the head of a program's text."""

    def __init__(self, text: str):
        tables = {name: _table(text, name) for name in ("FileNames", "FileLocations", "StackFrames")}
        self._files = {at: entry.strip('"') for at, entry in tables["FileNames"].items()}
        self._locations = {at: _fields(entry) for at, entry in tables["FileLocations"].items()}
        self._frames = {at: _fields(entry) for at, entry in tables["StackFrames"].items()}

    def line(self, operation: str) -> str | None:
        """Where the model or the loss makes an operation, given by its line of text, as "model.py:12"; None where jzero
        itself does, or the program does not tell."""
        match = _FRAME_ID.search(operation)
        at, seen = int(match[1]) if match else 0, set()
        while at in self._frames and at not in seen:  # the outermost is its own parent
            seen.add(at)
            frame = self._frames[at]
            location = self._locations.get(frame.get("file_location_id", 0), {})
            path = Path(self._files.get(location.get("file_name_id", 0), ""))
            own = path.is_relative_to(_LIBRARY) and not path.is_relative_to(_LIBRARY / "models")
            if own:
                return None
            if "site-packages" not in path.parts or path.is_relative_to(_LIBRARY):
                return f"{path.name}:{location.get('line')}"
            at = frame.get("parent_frame_id", 0)
        return None


def _table(text: str, name: str) -> dict[int, str]:
    _, _, rest = text.partition(f"\n{name}\n")
    rows, _, _ = rest.partition("\n\n")
    return {int(entry[1]): entry[2] for line in rows.splitlines() if (entry := _ENTRY.match(line))}


def _fields(entry: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", entry)}
