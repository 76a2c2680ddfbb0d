"""The command line that the experiments of this folder share."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from isobit.demo import MODES

ROOT = Path(__file__).resolve().parents[2]


def parse(
    doc: str, add_flags: Callable[[argparse.ArgumentParser], None], quick: Mapping[str, Any]
) -> argparse.Namespace:
    """The arguments of this process. `quick`: the defaults with --quick."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=_HelpFormatter)
    add = parser.add_argument
    add("--bin_dir", type=Path, default=ROOT / "build/release/bin", metavar="DIR", help="the services")
    add("--model", type=Path, default=ROOT / "models/smollm2-135m-instruct", metavar="DIR")
    add("--shape", default="", help="take random weights of this shape of isobit-model instead of --model")
    add("--dummy_weights", action="store_true", help="let the services draw --shape's weights themselves")
    add(
        "--modes", nargs="+", choices=MODES, default=MODES, metavar="MODE", help=f"some of {', '.join(MODES)}"
    )
    add("--backend", choices=("cpu", "cuda"), default="cpu", help="of the services")
    for service in ("rollout", "scorer"):
        add(
            f"--{service}_flag",
            action="append",
            default=[],
            metavar="FLAG",
            help=f"for isobit-{service}, such as --{service}_flag=--devices=4,5; may be repeated",
        )
    add("--seed", type=int, default=20, help="of prompts and sampling")
    add("--start_timeout_s", type=float, default=600, metavar="S", help="for a service to serve")
    add("--log_dir", type=Path, metavar="DIR", help="for the services' logs; else kept only after a failure")
    add("--json", type=Path, metavar="FILE", help="write every figure here")
    add("--quick", action="store_true", help="a tiny random model and little work, on any machine")
    add_flags(parser)
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(shape="tiny-llama", **quick)
    arguments = parser.parse_args()
    if arguments.dummy_weights and not arguments.shape:
        parser.error("--dummy_weights needs --shape")
    return arguments


def add_targets(parser: argparse.ArgumentParser, service: str) -> None:
    """Adds a flag that names services that already run."""
    text = f"each an isobit-{service} that runs already; then none is started"
    parser.add_argument(f"--{service}", nargs="+", default=[], metavar="HOST:PORT", help=text)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass
