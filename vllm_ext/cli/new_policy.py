"""`vllm-ext new-policy`: write a policy of one's own to start from, and a test that passes."""

from __future__ import annotations

import argparse
import keyword
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from vllm_ext.cli.command import Parser, UsageError, guarded


def main(argv: Sequence[str]) -> int:
    """Run the command; 0, or 2 if the name cannot be one or a file is there already."""
    parser = Parser(
        prog="vllm-ext new-policy",
        description="Write NAME.py, an ordering to start from, and test_NAME.py, which passes.",
    )
    parser.add_argument("name", metavar="NAME", help="of the module, such as my_policy")
    parser.add_argument("--dir", type=Path, default=Path(), metavar="DIR", help="folder to write to (default: here)")
    return guarded(parser, _write, argv)


def _write(args: argparse.Namespace) -> int:
    name: str = args.name.replace("-", "_")
    if not name.isidentifier() or keyword.iskeyword(name) or not name.islower():
        raise UsageError(f"{args.name}: must be a Python module's name in lower case, such as my_policy")
    policy, test = args.dir / f"{name}.py", args.dir / f"test_{name}.py"
    cls = "".join(part.capitalize() for part in name.split("_"))
    texts = {path: _template(kind, name, cls) for path, kind in ((policy, "policy"), (test, "test"))}
    args.dir.mkdir(parents=True, exist_ok=True)
    for path in texts:
        if path.exists():
            raise FileExistsError(f"{path} is there already; choose another name or --dir")
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    print(f"{policy}: the policy, {cls}")
    print(f"{test}: its test: pytest {test}")
    print("try it: vllm-ext simulate --system upstream-fcfs,fcfs --rate 30 --num-requests 300 --num-blocks 300 "
          f"--policy {policy}:{cls}")  # fmt: skip
    print(f"serve it: vllm serve MODEL --policy {policy}:{cls}")
    return 0


def _template(kind: str, name: str, cls: str) -> str:
    text = resources.files("vllm_ext.cli").joinpath(f"new_policy_{kind}.txt").read_text(encoding="utf-8")
    return text.replace("MODULE", name).replace("CLASS", cls)
