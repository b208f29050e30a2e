"""What a row of numbers is, and who takes it."""

from typing import Any, Protocol, runtime_checkable

Row = dict[str, Any]


class Sink(Protocol):
    """Takes rows of host values in the order of their steps.

    What it raises ends the run; one that the run can do without catches its own faults. After a resumption the rows of
    steps that the run does again come again: the first row says where that begins.
    """

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class DurableSink(Sink, Protocol):
    """A sink whose rows outlive a power cut once it is told so: the trainer does before it saves a checkpoint."""

    def sync(self) -> None:
        """Returns when the rows written so far are on the disk."""
        ...
