"""``python -m normalign COMMAND``."""

from __future__ import annotations

import argparse

from normalign import _sweep_cli, demo
from normalign._config import show_config


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m normalign")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="version, instruction set, threads, CUDA")
    info.set_defaults(run=_info)
    demo.add_parser(commands)
    _sweep_cli.add_parser(commands)
    args = parser.parse_args(argv)
    return int(args.run(args))


def _info(args: argparse.Namespace) -> int:
    show_config()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
