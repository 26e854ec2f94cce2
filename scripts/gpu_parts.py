"""What the check of a machine with a GPU runs: commands, in parts, in order of value; and how its time is divided.

Every command gets at least its share, whatever those before it take, and at most its limit. So the least shares and the
set-up together fit into the whole time, and the limits are more than that: what one leaves over, the next may use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

TOTAL_S = 470.0
"""From the start of the process to its end."""
SET_UP_S = 35.0
"""Of it, for unpacking the bundle and asking what is there."""
PROFILE = "profile.json"


@dataclass(frozen=True, kw_only=True)
class Share:
    """Seconds that a command may take."""

    least_s: float
    """Kept for it, whatever those before it take."""
    most_s: float
    """Ended then, however much is left."""

    def limit_s(self, left_s: float, later: Sequence[Share]) -> float:
        """Return the seconds to give, of those that are left, so that later shares get their least.

        A set-up that took too long is at the cost of the last ones: this share's least goes before theirs.
        """
        free_s = left_s - sum(share.least_s for share in later)
        return max(0.0, min(self.most_s, free_s), min(self.least_s, left_s))


NO_SHARE = Share(least_s=0.0, most_s=0.0)


@dataclass(frozen=True, kw_only=True)
class Command:
    """One process.

    ``{out}`` among its arguments stands for the JSON file that it writes, ``{folder}`` for the folder of its part's
    files, which have the names of commands, and ``{seconds}`` for a time somewhat below its limit, in which it should
    end by itself. A command without ``{out}`` prints its results as lines of JSON. Either is read even if the command
    is ended early.

    Exit status 0: done, and right where it compares; 1, together with a result whose ``wrong`` names what: a comparison
    found something wrong; anything else: the command failed. Python exits with 1 after any exception, so that the
    status alone says nothing.
    """

    name: str
    arguments: tuple[str, ...]
    share: Share = NO_SHARE
    needs: str = "vllm"
    """Modules that have to be importable, besides PyTorch and Triton, separated by blanks."""
    at_once: bool = False
    """Run beside its neighbours that are: mostly compiles, and is not timed."""
    background: bool = False
    """Goes on beside later parts until all are through: it leaves the device alone, and needs few processors."""

    @property
    def dry(self) -> tuple[str, ...]:
        """Return what tries its imports and its arguments: scripts without a command line are only loaded."""
        script, *options = self.arguments
        if script == "-m":
            return (*self.arguments, "--collect-only")
        if not options or options[0] == "cuda":
            return ("-c", f"import runpy; runpy.run_path({script!r}, run_name='dry run')")
        return (script, *options, "--help")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Commands of a part that run at the same time."""

    part: str
    commands: tuple[Command, ...]

    @property
    def share(self) -> Share:
        """Return the largest of its commands'."""
        shares = [command.share for command in self.commands]
        return Share(
            least_s=max(share.least_s for share in shares),
            most_s=max(share.most_s for share in shares),
        )

    @property
    def is_background(self) -> bool:
        """Whether nobody waits for it before the end."""
        return all(command.background for command in self.commands)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Commands that make one file."""

    name: str
    commands: tuple[Command, ...]

    @property
    def stages(self) -> list[Stage]:
        """Return its commands in their order, those beside each other that run at once together."""
        # Groups: by number, or by -1 where a command runs at once.
        numbered = enumerate(self.commands)
        groups = groupby(numbered, lambda pair: (-1 if pair[1].at_once else pair[0], pair[1].background))
        return [Stage(part=self.name, commands=tuple(command for _, command in group)) for _, group in groups]


def benchmark(name: str, script: str, *options: str, least_s: float, most_s: float, needs: str = "vllm") -> Command:
    """Return a command that writes its result."""
    arguments = (f"benchmarks/gpu/{script}", "--out", "{out}", *options)
    return Command(name=name, arguments=arguments, share=Share(least_s=least_s, most_s=most_s), needs=needs)


def at_once(name: str, script: str, *options: str, share: Share) -> Command:
    """Return a benchmark that tells what engines answer, not how fast: they run beside all else that is compared."""
    made = benchmark(name, script, *options, least_s=share.least_s, most_s=share.most_s)
    return replace(made, at_once=True)


def comparison(name: str, *arguments: str, needs: str = "") -> Command:
    """Return a command that compares kernels with their definition."""
    return Command(name=name, arguments=arguments, share=_KERNELS, needs=needs, at_once=True)


_KERNELS = Share(least_s=85.0, most_s=130.0)
_TESTS = (
    *("-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"),
    *("tests/kv/test_cuda_gpu.py", "tests/cellular/test_graphed.py"),
)
PARTS = (
    Part(
        name="right",
        commands=(
            comparison("attention", "tests/kernels/paged_attention/gpu_script.py", "cuda"),
            comparison("quantisation", "tests/kernels/gpu_script.py", "cuda"),
            comparison("copies", "tests/kv/cuda_codec_script.py", "cuda", needs="pydantic"),
            comparison("tests", *_TESTS, needs="pytest pydantic"),
            # Some 75 s, of which an engine's start takes most.
            at_once(
                "engines", "gpu_right.py", "--settings", "stock,own,tier-8,int8,triton,tier-16", "--at-once", "6",
                "--limit-s", "{seconds}", share=_KERNELS,
            ),
            at_once(
                "conversations", "gpu_talks.py", "--settings", "stock,int8,own", "--at-once", "3",
                "--limit-s", "{seconds}", share=_KERNELS,
            ),
        ),
    ),
    Part(
        name="token_budget",
        commands=(
            benchmark(
                "measured", "gpu_budget.py", "--profile", f"{{folder}}/{PROFILE}", "--total-s", "{seconds}",
                "--window-s", "20", "--drain-s", "6", least_s=160.0, most_s=200.0,
            ),
            Command(
                name="simulated", background=True,
                arguments=("benchmarks/gpu/gpu_budget.py", "--out", "{out}", "--simulate", "{folder}/measured.json"),
            ),
        ),
    ),
    Part(
        name="swap",
        commands=(
            benchmark("copies", "kv_tier_cuda.py", "--quick", needs="pydantic", least_s=15.0, most_s=35.0),
            benchmark("returning", "gpu_return.py", "--limit-s", "60", least_s=50.0, most_s=100.0),
        ),
    ),
    Part(
        name="attention",
        commands=(benchmark("kernels", "attention_gpu.py", "--quick", needs="", least_s=38.0, most_s=60.0),),
    ),
    Part(
        name="decode",
        commands=(benchmark("steps", "gpu_decode.py", "--quick", "--limit-s", "55", least_s=85.0, most_s=130.0),),
    ),
)  # fmt: skip
