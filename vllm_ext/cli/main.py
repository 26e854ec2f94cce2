"""The `vllm-ext` command: a table of subcommands, each imported only when it is the one asked for."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import vllm_ext
from vllm_ext.cli import command

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "cellular": "serve models of many small steps, batched at every step",
        "cluster": "serve a model by several replicas on Ray Serve",
        "compare": "send the same requests to several servers and say which is better",
        "demo": "serve a small model and show what vllm-ext does",
        "doctor": "say whether this installation works, and if not, why",
        "new-policy": "write a policy of your own to start from, and its test",
        "options": "list all options: flag, what is allowed, default, what it does",
        "patches": "list the hooks into vLLM and the verified versions",
        "plan": "simulate every system on your trace and recommend one",
        "predictor": "train, judge, show and clear what length prediction learned",
        "profile": "measure step times for the runtime model",
        "quality": "say whether KV in 8 bits changes a model's answers",
        "repro": "measure figures and tables of papers again on the simulator",
        "simulate": "serve a workload in virtual time",
        "sweep": "run a grid of simulations, or search capacities",
        "tiny-model": "write a small random model for trying out",
        "top": "show what a running server does, refreshed each second",
        "validate": "compare the simulator with a recorded run of the real engine",
    }
)
"""Name -> one line for ``vllm-ext --help``; the command is ``main`` of the module of that name."""


def module_of(name: str) -> str:
    """Return the module of a command."""
    return f"vllm_ext.cli.{name.replace('-', '_')}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: Arguments without the program's name; those of the process if None.

    Returns:
        The exit status.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(arguments)
        finally:
            if sys.stdout is not None:  # closed
                sys.stdout.flush()
    except OSError as error:  # of standard output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit does not fail too
        if isinstance(error, BrokenPipeError):
            return 141
        print(f"vllm-ext: {error}", file=sys.stderr)
        return command.FAILED


def _run(arguments: Sequence[str]) -> int:
    # argparse sees the subcommand's name only: the arguments after it belong to the subcommand's own parser.
    name = _parser().parse_args(arguments[:1]).command
    try:
        status: int = importlib.import_module(module_of(name)).main(arguments[1:])
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        print(f"vllm-ext {name}: {command.told(error)}", file=sys.stderr)
        return command.FAILED
    return status


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    table = "\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="vllm-ext",
        description="Better scheduling and memory for stock vLLM.",
        usage="vllm-ext [-h] [--version] COMMAND ...",
        epilog=f"commands:\n{table}\n\n`vllm-ext COMMAND --help` lists a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vllm-ext {vllm_ext.__version__}")
    parser.add_argument("command", choices=list(COMMANDS), metavar="COMMAND", help="one of the commands below")
    return parser


if __name__ == "__main__":
    sys.exit(main())
