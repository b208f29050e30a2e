"""SIGINT and SIGTERM as requests that a loop answers when it is ready to."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class StopSignal:
    """The number of the first SIGINT or SIGTERM that came, None before that."""

    number: int | None = None


@contextmanager
def stop_signals() -> Iterator[StopSignal]:
    """Within, the first SIGINT or SIGTERM is only noted; a second one ends the process at once, with exit
    code 128 plus its number.

    Python takes handlers in the main thread only: in another one nothing is noted.
    """
    stop = StopSignal()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def note(number: int, frame: Any) -> None:
        if stop.number is not None:
            os._exit(128 + number)
        stop.number = number

    earlier = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in earlier.items():
            # None: a handler that C code had installed, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
