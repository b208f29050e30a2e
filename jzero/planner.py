"""The command line of the planner: `python -m jzero.planner --config FILE [--devices SPEC] [section.field=value]`."""

import argparse
import os
import sys
from collections.abc import Sequence

from jzero.config import RuntimeConfig, load_config
from jzero.errors import JzeroError
from jzero.hardware import Cluster, parse_devices

EPILOG = """\
examples:
  python -m jzero.planner --config configs/llama_1b.yaml --devices h100:8
  python -m jzero.planner --config configs/llama_7b5.yaml --devices h100:64 --search --write chosen.yaml
  python -m jzero.planner --config configs/quickstart.yaml --devices 8 hardware.memory=2e6

SPEC: 8, 2x8 (nodes x devices), h100:64, a100-80:2x4, v5e:8x8, v5p:4x4x4. Without it: runtime.fake_devices, or 8.
Nothing runs on a real accelerator. Exit codes: 0 done, 1 a fault, 2 a mistake in what was asked for.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    arguments = _parser().parse_intermixed_args(argv)
    try:
        config = load_config(arguments.config, arguments.overrides)
        spec = arguments.devices or str(config.runtime.fake_devices or 8)
        asked = config.runtime.platform
        cluster = parse_devices(spec, config.hardware, "cpu" if asked == "auto" else asked)
        _start(cluster, arguments.compile)
        from jzero.planning.command import run

        wanted = {"searching": arguments.search, "compiling": arguments.compile, "as_json": arguments.json}
        return run(config, cluster, **wanted, write=arguments.write, plot=arguments.plot)
    except JzeroError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # of a disk, or of who reads what is printed
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jzero.planner",
        description="Says what training takes on hardware that need not be there, for every stage of ZeRO.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="as for jzero.train")
    parser.add_argument("--devices", metavar="SPEC", help="the hardware to plan for")
    parser.add_argument("--search", action="store_true", help="also try micro-batch, accumulation, remat and meshes")
    parser.add_argument("--compile", action="store_true", help="compile the step of the config's own stage, too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--write", metavar="FILE", help="a new YAML file for the config that is recommended")
    parser.add_argument("--plot", metavar="FILE", help="a picture of it: .svg, .png or .pdf")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="goes before the file")
    return parser


def _start(cluster: Cluster, compiling: bool) -> None:
    """This process computes on the CPU alone, to compile with as many fake devices as those that are planned for."""
    from jzero import runtime

    os.environ["JAX_PLATFORMS"] = "cpu"  # whatever the shell says: an accelerator here may be another's
    fake = cluster.num_devices if compiling and cluster.platform == "cpu" else None
    runtime.start(RuntimeConfig(platform="cpu", fake_devices=fake))


if __name__ == "__main__":
    sys.exit(main())
