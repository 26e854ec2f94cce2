#!/usr/bin/env python3
"""The rooms of the package: which may import which, and the picture of them in docs/architecture.md.

    python scripts/rooms.py            # rewrite the picture
    python scripts/rooms.py --check    # exit with 1 if it is out of date

A room is a package below `vllm_ext`, `kernels/` and `patches/` included, or a module that lies in none.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "vllm_ext"
PAGE = ROOT / "docs" / "architecture.md"
_NAME = re.compile(r'"vllm_ext\.([\w.]+)(?::\w+)?"')
_BEGIN, _END = "<!-- rooms: begin -->\n", "<!-- rooms: end -->"

LAYERS = """
    cli
    compare
    experiments demo quality
    cluster cellular
    plugin
    simulation
    patches
    launch
    admin predictor slo metrics token_memory routing
    scheduling
    kv attention
    systems
    prediction
    contract
    step_time
    report
    tiny_model kernels hooks config envs hints files datasets
"""
"""The rooms, the highest first. A room imports from its own line and from lines below it."""


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return the modules of the package, by the name they ship under without ``vllm_ext``."""
    shipped = {"": root / PACKAGE, "kernels": root / "kernels", "patches": root / "patches"}
    found = {}
    for first, folder in shipped.items():
        for path in folder.rglob("*.py"):
            parts = [first, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(part for part in parts if part and part != "__init__")] = path
    return found


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield full names of what is imported anywhere in a module, absolute as TID252 wants it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def imports(root: Path = ROOT) -> dict[str, frozenset[str]]:
    """Return the modules of the package that each module imports; imports in functions count."""
    known, found = modules(root), {}
    for name, path in known.items():
        targets = set()
        for target in imported(ast.parse(path.read_text(encoding="utf-8"))):
            top, _, inner = target.partition(".")
            if top == PACKAGE:  # `from a import b`: b is a module, or a name in the module a
                targets.add(inner if inner in known else inner.rpartition(".")[0])
        found[name] = frozenset(targets - {name, ""})
    return found


def served(root: Path = ROOT) -> frozenset[str]:
    """Return the modules that a server can come to load: what the plugin and the hooks reach by imports, or by a name.

    vLLM and our registries take classes by names such as ``vllm_ext.kv.connector.tiered``.
    """
    known, reached = modules(root), set[str]()
    coming = [name for name in known if room_of(name) in ("plugin", "patches")]
    while coming:
        name = coming.pop()
        if name in reached:
            continue
        reached.add(name)
        named = _NAME.findall(known[name].read_text(encoding="utf-8"))
        coming += [*imports(root)[name], *(inner for inner in named if inner in known)]
    return frozenset(reached)


def room_of(module: str) -> str:
    """Return the room in which a module lies."""
    return module.partition(".")[0]


def layer_of(module: str) -> int:
    """Return the line of `LAYERS` in which a module's room stands.

    Raises:
        LookupError: it stands in none, or in several.
    """
    room = room_of(module)
    lines = [[fnmatch(room, pattern) for pattern in line.split()] for line in LAYERS.splitlines()]
    if sum(map(sum, lines)) != 1:
        raise LookupError(f"{room}: must stand once in LAYERS of scripts/rooms.py")
    return next(number for number, line in enumerate(lines) if any(line))


def picture(root: Path = ROOT) -> str:
    """Return the table of rooms, in Markdown."""
    known = modules(root)
    rooms = sorted({room_of(name) for name in known} - {""}, key=lambda room: (layer_of(room), room))
    used: dict[str, set[str]] = {room: set() for room in rooms}
    for name, targets in imports(root).items():
        if name:
            used[room_of(name)] |= {room_of(target) for target in targets} - {room_of(name)}
    lines = ["| room | holds | imports |", "|---|---|---|"]
    before = 0
    for room in rooms:
        if before and layer_of(room) != before:
            lines.append("| | | |")
        before = layer_of(room)
        below = ", ".join(f"`{other}`" for other in rooms if other in used[room])
        lines.append(f"| `{room}` | {_says(known, room)} | {below} |")
    return "\n".join(lines) + "\n"


def _says(known: Mapping[str, Path], room: str) -> str:
    doc = ast.get_docstring(ast.parse(known[room].read_text(encoding="utf-8"))) or ""
    return doc.partition("\n")[0]


def rewritten(text: str, root: Path = ROOT) -> str:
    """Return the page with its picture made anew.

    Raises:
        ValueError: the page has no place for it.
    """
    begin, end = text.find(_BEGIN), text.find(_END)
    if begin < 0 or end < begin:
        raise ValueError(f"{PAGE.name} has no lines {_BEGIN.strip()} and {_END}")
    return text[: begin + len(_BEGIN)] + picture(root) + text[end:]


def main() -> int:
    """Rewrite the picture, or check it."""
    parser = argparse.ArgumentParser(description="Rewrite the picture of the package's rooms.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if it is out of date")
    check = parser.parse_args().check
    text = PAGE.read_text(encoding="utf-8")
    made = rewritten(text)
    if not check:
        PAGE.write_text(made, encoding="utf-8")
    elif made != text:
        print(f"out of date: {PAGE.relative_to(ROOT)}; run: python scripts/rooms.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
