"""Adds our flags to ``vllm serve``, ``vllm bench`` and every other parser that takes the engine's arguments.

Upstream symbol: ``EngineArgs.add_cli_args``. Seams tried: vLLM loads general plugins right before it builds its parser,
but hands the parser to platform plugins only (``pre_register_and_update``), and we are no platform; options can travel
in ``--additional-config``, which is what the flags end in, but nothing lists them in ``--help``.
Breaks without: our flags are unknown arguments; ``--additional-config`` still works.
Can go: when a general plugin can register arguments.

The parser only grows, so an upstream change does not matter until a feature is chosen; ``engine_config`` verifies then.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from vllm_ext.config import FLAGS, flags
from vllm_ext.hooks.patch import Patch

TITLE = "vllm-ext"
_DONE = "_vllm_ext_flags"


def _add_cli_args(original: Callable[..., Any], parser: Any, *args: Any, **kwargs: Any) -> Any:
    parser = original(parser, *args, **kwargs)
    add_flags(parser)
    return parser


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the argument group to the parser, once."""
    if getattr(parser, _DONE, False):
        return
    setattr(parser, _DONE, True)
    _refuse_in_one_line(parser)
    group = parser.add_argument_group(TITLE, _description())
    for path, (flag, field) in FLAGS.items():
        short = [name for name in flag.short.split() if name not in parser._option_string_actions]
        group.add_argument(*flags.names_of(path, flag), *short, **flags.argument(flag, field))


def _refuse_in_one_line(parser: argparse.ArgumentParser) -> None:
    """Have the parser refuse options of ours that are not allowed, before anything is started."""
    parse = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        from vllm_ext.launch import tuned
        from vllm_ext.launch.arguments import refused_arguments

        found, rest = parse(args, namespace)
        tuned.note_given(found, lambda again: parse(args, again))
        problem = refused_arguments(found, serves=parser.prog.endswith("serve"))
        if problem is not None:
            parser.exit(2, f"{parser.prog}: {' '.join(problem.split())}\n")
        return found, rest

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def _description() -> str:
    from vllm_ext import systems

    names = ", ".join(row.name for row in systems.table() if not row.oracle)
    return (
        f"Scheduling systems of vllm-ext, chosen with --scheduler-cls NAME: {names}; A+B composes two. "
        "The flags below set parameters of the chosen system."
    )


HOOKS = (
    Patch(
        target="vllm.engine.arg_utils:EngineArgs.add_cli_args",
        feature="flags",
        why="general plugins can't register command-line arguments",
        breaks_without="--ext-* flags are unknown; --additional-config still works",
        remove_when="a general plugin can register arguments",
        replacement=_add_cli_args,
    ),
)
