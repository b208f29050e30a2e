"""The command line of the trainer: `python -m jzero.train --config FILE [section.field=value ...]`."""

import argparse
import sys
from collections.abc import Sequence

from jzero.config import dump_config, load_config
from jzero.errors import JzeroError

EPILOG = """\
example:
  python -m jzero.train --config configs/quickstart.yaml zero.stage=2 train.num_steps=500

Every field, its meaning and its default: jzero/config/; --print-config shows their values.
Exit codes: 0 done, 1 a fault, 2 a mistake in what was asked for, 130 or 143 interrupted and saved:
the same command goes on.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jzero.train",
        description="Trains a language model with ZeRO.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML, JSON or TOML; fields it leaves out keep their defaults")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config and stop")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="goes before the file")
    arguments = parser.parse_intermixed_args(argv)
    try:
        config = load_config(arguments.config, arguments.overrides)
        if arguments.print_config:
            print(dump_config(config), end="")
            return 0
        from jzero import runtime  # from here on JAX: help and mistakes in the config must not wait for it

        runtime.start(config.runtime)
        from jzero.trainer import run_training

        return run_training(config)
    except JzeroError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(
            f"error: {error}\nThe same command goes on from the last checkpoint once that is mended.", file=sys.stderr
        )
        return 1
    except KeyboardInterrupt:  # inside the loop the trainer itself answers signals
        print("interrupted while no training was under way: nothing to save", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
