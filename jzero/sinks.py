"""Where the rows of a run go, by its config."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

from rich.console import Console

from jzero.config import Config
from jzero.display import console_sink, say
from jzero.metrics import Sink
from jzero.metrics.csv_file import CsvSink
from jzero.metrics.jsonl import JsonlSink
from jzero.metrics.row_files import set_aside
from jzero.metrics.tensorboard import TensorBoardSink
from jzero.metrics.weights_and_biases import WandbSink
from jzero.rundir import RunDirectory, assert_usable


@contextmanager
def open_sinks(config: Config, directory: RunDirectory, console: Console, start: int) -> Iterator[list[Sink]]:
    """The sinks that `config.log` asks for, of a run that goes on after step `start`; closed at the end.

    Raises ConfigError where a file of the run directory cannot be written.
    """
    log = config.log
    jsonl, csv = directory.metrics, directory.path / "metrics.csv"
    with ExitStack() as opened:

        def opening(sink: Sink) -> Sink:
            return opened.enter_context(closing(sink))

        with assert_usable(directory):
            for path in (jsonl, csv) if start == 0 else ():
                if aside := set_aside(path):
                    told = f"no checkpoint goes with {path}: it is now {aside.name}, the run starts anew"
                    say(console, told)
            sinks = [opening(JsonlSink(jsonl, start))]
            if log.csv:
                sinks.append(opening(CsvSink(csv, start)))
            if log.tensorboard:
                sinks.append(opening(TensorBoardSink(directory.tensorboard, start)))
            if log.wandb:
                shown = config.model_dump(mode="json")
                sinks.append(opening(WandbSink(log.wandb, directory.path, shown, start)))
        num_steps = config.train.num_steps
        sinks.append(opening(console_sink(console, start_step=start, num_steps=num_steps, every=log.every)))
        yield sinks
