"""The command line: `python -m jzero.metrics plot RUN [RUN ...]`."""

import argparse
import sys
from collections.abc import Sequence

from jzero.errors import JzeroError
from jzero.metrics.plot import plot_runs


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jzero.metrics", description="Looks at the numbers of runs.")
    commands = parser.add_subparsers(dest="command", required=True)
    plot = commands.add_parser("plot", help="draw loss and throughput curves", description="Draws the curves of runs.")
    plot.add_argument("runs", nargs="+", metavar="RUN", help="a run's directory, also while the run goes on")
    plot.add_argument("--out", default="metrics.png", metavar="FILE", help="png, svg or pdf (default: %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        plot_runs(arguments.runs, arguments.out)
    except JzeroError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
