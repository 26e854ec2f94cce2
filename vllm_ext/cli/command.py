"""How a command is run and says what is wrong; with the standard library alone, as `doctor` tells what else is missing.

Exit statuses: 0 yes or done, 1 no, 2 a flag or a file is wrong, 3 failed or incomplete, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

FAILED = 3
INSTALL = "run `make setup`, or pip install 'vllm-ext[cpu]', with a GPU 'vllm-ext[cuda]'"
"""What to do where something is missing that most of the package needs."""
LAB = frozenset({"cellular", "compare", "demo", "experiments", "quality", "simulation"})
"""Rooms that an installation for servers alone may lack."""
GOES_ON = "what is done is kept, the same command goes on with the rest"


class UsageError(ValueError):
    """A flag or a file is wrong; the message is one line that names it."""


class Failed(Exception):
    """The command could not do its work, for the reason told."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; abbreviations of flags are not understood. ``args.parser`` is who parsed them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.set_defaults(parser=self)
        self.flag_of: dict[str, str] = {}
        """Dotted path of a field -> the flag that sets it, for messages on the field."""

    def error(self, message: str) -> NoReturn:
        """End the process with status 2 and one line on stderr, without argparse's usage."""
        self.exit(2, f"{self.prog}: {message}\n")


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what stands before ``--``, and what stands behind it."""
    at = argv.index("--") if "--" in argv else len(argv)
    return [*argv[:at]], [*argv[at + 1 :]]


def guarded(
    parser: argparse.ArgumentParser, body: Callable[[argparse.Namespace], int], argv: Sequence[str], *,
    failures: tuple[type[Exception], ...] = (), again: str = "",
) -> int:  # fmt: skip
    """Run a command and say in a line what is wrong.

    Args:
        parser: Of its arguments; ``body`` gets them, and the whole command line as ``args.command_line``.
        body: Returns the exit status.
        argv: Arguments after the command's name.
        failures: Errors that are failures of the work, as `Failed`: told in full, with status 3.
        again: What to say after Ctrl-C, a format of the arguments.

    Raises:
        ModuleNotFoundError: `cli.main` says what to install.
        BrokenPipeError: nobody reads the output any more, which `cli.main` ends quietly.
    """
    args = parser.parse_args(list(argv))
    args.command_line = [*parser.prog.split(), *argv]
    used = getattr(args, "parser", parser)
    prog = used.prog
    failures = (Failed, *failures)
    caught: tuple[type[Exception], ...] = (*failures, ValueError, OSError, ImportError)
    try:
        return body(args)
    except (ModuleNotFoundError, BrokenPipeError):
        raise
    except caught as error:
        if isinstance(error, failures) and not isinstance(error, UsageError):
            print(f"{prog}: {error}", file=sys.stderr)
            return FAILED
        flag = _typed(used, getattr(used, "flag_of", {}).get(getattr(error, "field", "")), argv)
        print(f"{prog}: {f'{flag}: ' if flag else ''}{' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        said = f"; {again.format(**vars(args))}" if again else ""
        print(f"\n{prog}: interrupted{said}", file=sys.stderr)
        return 130


def _typed(parser: argparse.ArgumentParser, flag: str | None, argv: Sequence[str]) -> str | None:
    """Return a flag by the one of its names that was typed, if any was."""
    action = parser._option_string_actions.get(flag or "")
    words = {word.partition("=")[0] for word in argv}
    return next((name for name in (action.option_strings if action else ()) if name in words), flag)


def need(module: str) -> None:
    """Raise ModuleNotFoundError if a module is not installed, before work is begun that each fails without it."""
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def told(error: ModuleNotFoundError) -> str:
    """Return the line for what is not installed.

    Raises:
        ModuleNotFoundError: It is a part of this package, and not one that may be left out.
    """
    missing, _, inner = (error.name or "").partition(".")
    if missing in ("", "vllm_ext"):
        room = inner.partition(".")[0]
        if room not in LAB or importlib.util.find_spec(f"{missing}.{room}") is not None:
            raise error
        return f"needs {missing}.{room}, which is not installed: pip install 'vllm-ext[lab]'"
    if inner and importlib.util.find_spec(missing) is not None:
        return f"the {missing} that is installed has no {error.name}: install another version"
    return f"needs {missing}, which is not installed: {INSTALL}"
