"""Parameters named by patterns of their paths, such as "layers/*/bias". `*` also stands for slashes."""

import difflib
import fnmatch
from collections.abc import Collection, Sequence

from jzero.errors import ConfigError

_SHOWN = 6


def matching(field: str, patterns: Sequence[str], paths: Collection[str], kind: str = "parameter") -> set[str]:
    """The paths that any of the patterns (fnmatch's) matches. kind: what the paths name.

    Raises ConfigError, naming the field and the nearest paths, for a pattern that matches none.
    """
    found = set()
    for pattern in patterns:
        hits = fnmatch.filter(paths, pattern)
        if not hits:
            near = difflib.get_close_matches(pattern, paths, n=_SHOWN, cutoff=0.3) or sorted(paths)[:_SHOWN]
            raise ConfigError(
                f"{field} names {pattern!r}, which matches no {kind}. There are {', '.join(near)}"
                f"{' and others' if len(paths) > len(near) else ''}."
            )
        found.update(hits)
    return found
