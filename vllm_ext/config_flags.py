"""The flags of `vllm serve` and `vllm bench` that set our options."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_ext.config_checks import ConfigError


def comma_list(text: str) -> list[str]:
    """Split ``a,b`` at its commas; blanks around an item and a trailing comma do not count."""
    return [item.strip() for item in text.split(",") if item.strip()]


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One command-line flag and the option it sets."""

    name: str
    """Flag as typed, such as ``--ext-levels``."""

    path: tuple[str, ...]
    """Keys below ``vllm_ext`` that lead to the option."""

    type: Callable[[str], Any]
    """Turns the text into a value; ``bool`` stands for a pair ``--x`` / ``--no-x`` without a text."""

    help: str
    """One sentence for ``--help``."""

    metavar: str | None = None
    """Placeholder of the text in ``--help``; not for ``bool``."""

    short: str | None = None
    """A shorter name as well, unless vLLM has a flag of that name."""

    @property
    def dest(self) -> str:
        """Name of the attribute in the parsed arguments."""
        return self.name.removeprefix("--").replace("-", "_")


def comma_numbers(text: str) -> list[float]:
    """Split ``1,2.5`` at its commas into numbers."""
    return [float(item) for item in comma_list(text)]


_GAMMA = {"normalised": 0.25, "mean": 0.5, "tail": 1.0}
"""By what is to be short: how much waiting counts against cost."""


def gamma_for(text: str) -> float:
    """Return the power of waiting for ``normalised``, ``mean`` or ``tail``."""
    if text == "ttft":
        raise argparse.ArgumentTypeError("'ttft': is a system of its own, --scheduler-cls alise-ttft, with a KV tier")
    if text not in _GAMMA:
        raise argparse.ArgumentTypeError(f"{text!r}: must be one of {', '.join(_GAMMA)}")
    return _GAMMA[text]


FLAGS: tuple[Flag, ...] = (
    Flag(
        name="--tbt-slo-ms",
        path=("slo", "tbt_ms"),
        type=float,
        metavar="MS",
        help="Objective for every gap between tokens, of requests that bring none; sarathi's token budget follows it.",
    ),
    Flag(
        name="--ttft-slo-ms",
        path=("slo", "ttft_ms"),
        type=float,
        metavar="MS",
        help="Objective for the time to the first token, of requests that bring none.",
    ),
    Flag(
        name="--ttft-slo-bucket-ms",
        path=("slo", "ttft_bucket_ms"),
        type=comma_numbers,
        metavar="A,B",
        help="The same for prompts of up to 512 tokens, up to 1024, and so on.",
    ),
    Flag(
        name="--jct-slo-ms",
        path=("slo", "jct_ms"),
        type=float,
        metavar="MS",
        help="Objective for the time to the last token, of requests that bring none.",
    ),
    Flag(
        name="--ext-shed",
        path=("slo", "shed"),
        type=bool,
        help="Whether a request whose TTFT objective can't be met is answered with 503 and Retry-After.",
    ),
    Flag(
        name="--ext-age-limit-s",
        path=("ordering", "age_limit_s"),
        type=float,
        metavar="S",
        help="Seconds of waiting after which a request goes first, whatever its length and others' objectives.",
    ),
    Flag(
        name="--ext-optimise",
        path=("ordering", "gamma"),
        type=gamma_for,
        metavar="WHAT",
        help="What alise and auto make short: normalised (latency per token), mean (the default), or tail; "
        "for first tokens there is --scheduler-cls alise-ttft.",
    ),
    Flag(
        name="--ext-share-by",
        path=("sharing", "by"),
        type=str,
        metavar="WHAT",
        help="What tells clients apart where they take turns (fair): tag (the default), salt, adapter, or key.",
    ),
    Flag(
        name="--ext-preemption",
        path=("admission", "preempt"),
        type=bool,
        help="Whether a more urgent request may push out a running one.",
    ),
    Flag(
        name="--ext-prediction-sources",
        path=("prediction", "sources"),
        type=comma_list,
        metavar="A,B",
        help="Where length predictions come from, in order of preference: hint, retrieval, history.",
    ),
    Flag(
        name="--ext-predictor-encoder",
        path=("predictor", "encoder"),
        type=str,
        metavar="MODEL",
        help="Sentence-transformers model that embeds prompts: a folder or an id of the hub.",
    ),
    Flag(
        name="--ext-predictor-folder",
        path=("predictor", "folder"),
        type=str,
        metavar="FOLDER",
        help="Where the predictor keeps what it learned; by default a folder of the served model in the cache.",
    ),
    Flag(
        name="--ext-predictor-threads",
        path=("predictor", "threads"),
        type=int,
        metavar="N",
        help="CPU threads of the predictor's process.",
    ),
    Flag(
        name="--kv-tier-gib",
        path=("kv_tier", "gib"),
        type=float,
        metavar="GIB",
        help="Host memory for KV blocks that leave the device, in GiB; 0 leaves the tier out.",
    ),
    Flag(
        name="--kv-tier-bits",
        path=("kv_tier", "bits"),
        type=int,
        metavar="N",
        help="16 keeps KV in host memory as it is, 8 quantises it to half the bytes.",
    ),
    Flag(
        name="--kv-tier-admin",
        path=("kv_tier", "admin"),
        type=bool,
        help="Whether conversations in the KV tier can be listed, pinned and dropped with the key VLLM_EXT_ADMIN_KEY.",
    ),
    Flag(
        name="--ext-attention-kernel",
        path=("attention", "kernel"),
        type=str,
        metavar="WHICH",
        help="Attention kernel: stock (vLLM's, the default), own, or auto: whichever was faster at start.",
    ),
    Flag(
        name="--ext-policy",
        short="--policy",
        path=("policies",),
        type=comma_list,
        metavar="FILE.py:CLASS",
        help="Policies of your own; each takes its axis of the system, which is fcfs if none is chosen.",
    ),
    Flag(
        name="--ext-modules",
        path=("modules",),
        type=comma_list,
        metavar="M,N",
        help="Python modules imported first; they may register further systems.",
    ),
    Flag(
        name="--ext-request-log",
        path=("request_log",),
        type=str,
        metavar="FILE",
        help="JSON-lines file that receives one line per finished request.",
    ),
    Flag(
        name="--ext-metrics-interval-s",
        path=("metrics_interval_s",),
        type=float,
        metavar="S",
        help="Seconds between two readings of the scheduler's state for the metrics; 0 switches them off.",
    ),
    Flag(
        name="--ext-profile",
        path=("profile",),
        type=str,
        metavar="FILE",
        help="File written by `vllm-ext profile` from which the runtime model starts.",
    ),
)
"""Flags of `vllm serve` and `vllm bench`; each sets one option and wins over ``--additional-config``."""


def merge_flags(options: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` overlaid with the flags in ``given``; neither is changed.

    Args:
        options: The dictionary under ``additional_config["vllm_ext"]``.
        given: Parsed arguments by `Flag.dest`; absent or ``None`` means that the flag was not given.

    Raises:
        ConfigError: An option that must hold others, such as ``ordering``, is no object.
    """
    merged = copy.deepcopy(dict(options))
    for flag in FLAGS:
        value = given.get(flag.dest)
        if value is None:
            continue
        node = merged
        for depth, key in enumerate(flag.path[:-1], start=1):
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise ConfigError(".".join(flag.path[:depth]), node, "must be an object")
        node[flag.path[-1]] = value
    return merged
