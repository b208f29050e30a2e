"""What the planner's command line does, once the process is settled."""

import json
import os
import sys
from pathlib import Path

from rich.console import Console

from jzero.config import Config, dump_config, with_fields
from jzero.display import say
from jzero.errors import ConfigError
from jzero.hardware import Cluster
from jzero.planning.candidates import stages
from jzero.planning.compiled import compile_step, compiled_record, compiled_report
from jzero.planning.plot import assert_drawable, draw
from jzero.planning.prediction import Prediction
from jzero.planning.ranking import search
from jzero.planning.recommendation import predict_config, recommend
from jzero.planning.record import plan_record, prediction_record
from jzero.planning.tables import LEGEND, assumptions, search_table, stage_table


def run(
    config: Config,
    cluster: Cluster,
    *,
    searching: bool = False,
    compiling: bool = False,
    as_json: bool = False,
    write: str | None = None,
    plot: str | None = None,
) -> int:
    """Plans every stage and prints what comes of it; returns the exit code. Raises UserError."""
    _assert_new(write)
    if plot is not None:
        assert_drawable(plot)
    console = Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=100)
    step = compile_step(config, cluster) if compiling else None
    tried = stages(config, cluster)
    predictions = [predict_config(stage.config, cluster) for stage in tried]
    recommendation = recommend(tried, predictions)
    own = [stage.config for stage in tried].index(config)
    ranked = search(config, cluster) if searching else []
    chosen = ranked[0] if ranked else None if recommendation.number is None else predictions[recommendation.number]
    if as_json:
        record = plan_record(tried, predictions, recommendation)
        if searching:
            record["search"] = [prediction_record(prediction) for prediction in ranked]
        if step:
            record["compiled"] = compiled_record(step, predictions[own])
        print(json.dumps(record, indent=2))
    else:
        console.print(stage_table([stage.name for stage in tried], predictions))
        console.print(f"{LEGEND}\n{assumptions(predictions[0])}\n\n{recommendation.reason}", highlight=False)
        if ranked:
            console.print(search_table(ranked))
        elif searching:
            console.print("Of all that the search tries, nothing fits.")
        if step:
            console.print(compiled_report(step, predictions[own]))
    if plot is not None:
        draw([stage.name for stage in tried], predictions).savefig(plot, dpi=150)
    if write:
        _write(write, chosen, recommendation.reason)
        if not as_json:
            say(console, f"wrote {write}")
    return 0


def _assert_new(write: str | None) -> None:
    """Refuses what cannot be written, before anything is planned."""
    if write is None:
        return
    path = Path(write).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--write {write}: the suffix must be .yaml or .yml")
    if path.exists():
        raise ConfigError(f"--write {write}: is there already; name another file, or delete that one")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--write {write}: there is no directory {path.parent}; make it first")


def _write(file: str, chosen: Prediction | None, reason: str) -> None:
    if chosen is None:
        raise ConfigError(f"--write {file}: nothing to write. {reason}")
    config = chosen.config
    if config.runtime.fake_devices:  # they stand for those that are planned for
        planned = chosen.cluster.num_devices if chosen.cluster.platform == "cpu" else None
        config = with_fields(config, {"runtime.fake_devices": planned})
    with open(Path(file).expanduser(), "x", encoding="utf-8") as out:
        out.write(dump_config(config))
