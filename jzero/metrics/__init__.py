"""Where a run's numbers go, and how fast it runs.

A row is a mapping from names to host values and always has `step`, the number of optimizer steps done
(1-based). Training rows carry `loss`, `grad_norm`, `tokens_per_second` and whatever else the step reports;
evaluation rows carry `eval_loss`. A value is a number, None where there is none yet, or a list: a histogram in
the bins of `jzero.gradstats`. A sink takes finished rows; `MetricWriter` finishes them without making the
device wait.

`jzero.trainer.run_training(config, sinks=[...])` takes sinks of your own, objects with `write(row)` and `close()`.
"""

from jzero.metrics.rows import DurableSink, Row, Sink

__all__ = ["DurableSink", "Row", "Sink"]
