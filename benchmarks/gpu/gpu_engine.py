"""A real vLLM engine with random weights, in this process, and a clock around its steps. A part of benchmarks of a GPU.

Weights are drawn, not downloaded: times do not depend on them. `--dry` starts a tiny model on the CPU instead, to try a
benchmark where there is no GPU; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import checkout  # noqa: F401 - before all that it makes importable
import on_gpu

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": _LLAMA,
    "tiny": _LLAMA
    | {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
    "dry": _LLAMA
    | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
}
"""Configurations of models: Llama-3.1-8B's, and small ones of the same kind."""
_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
_GRAPH_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]
_DRY_BYTES = 32 * 2**20
_POLL_S, _TAIL_CHARS = 0.2, 3000


def ours(system: str, **options: Any) -> dict[str, Any]:
    """Return the engine arguments of one of our systems."""
    return {"scheduler_cls": system, "additional_config": {"vllm_ext": {"metrics_interval_s": 0, **options}}}


SETTINGS: dict[str, dict[str, Any]] = {
    "stock": {},
    "triton": {"attention_backend": "TRITON_ATTN"},
    "own": ours("fcfs", attention={"kernel": "own"}),
    "alise": ours("alise"),
    "alise-tier": ours("alise", kv_tier={"gib": 16.0, "bits": 16}),
    "tier-16": ours("fcfs", kv_tier={"gib": 16.0, "bits": 16}),
    "tier-8": ours("fcfs", kv_tier={"gib": 16.0, "bits": 8}),
    "int8": ours("fcfs", attention={"kernel": "own"}, kv_tier={"device_int8_share": 0.3}),
}


@dataclass
class Seen:
    """What became of a request; times are seconds of the engine's clock."""

    arrival_s: float
    token_times_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of the tokens chosen, where they were asked for."""
    likely: list[dict[int, float]] = field(default_factory=list)
    """Logprobs of the likeliest tokens at each place, as many as were asked for, and the one that was chosen."""
    ended: bool = False
    aborted: bool = False

    @property
    def ttft_s(self) -> float:
        """From its arrival to its first token."""
        return self.token_times_s[0] - self.arrival_s

    @property
    def e2e_s(self) -> float:
        """From its arrival to its last token."""
        return self.token_times_s[-1] - self.arrival_s


def beside_others(gib: float) -> dict[str, Any]:
    """Return arguments of an engine that takes no more than it needs of its device, where others run at once.

    Args:
        gib: For KV. vLLM then does not look for what is free, which others take and give back meanwhile.
    """
    return {"kv_cache_memory_bytes": int(gib * 2**30), "gpu_memory_utilization": 0.02}


class Engine:
    """An engine in this process, stepped by whoever holds it.

    Args:
        setting: A key of `SETTINGS`.
        shape: A key of `SHAPES`; with ``dry`` it is the smallest one.
        dry: On the CPU.
        drawn: With weights such that next tokens are clear choices; those that vLLM draws make all about as likely.
        arguments: Of vLLM's engine, before and above all else.
    """

    def __init__(self, setting: str, shape: str, *, dry: bool = False, drawn: bool = False, **arguments: Any) -> None:
        began = time.perf_counter()
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        shape = "dry" if dry else shape
        loading = {"load_format": "auto" if drawn else "dummy"}
        common = {**_common(dry=dry), **loading, **_scaled(SETTINGS[setting], dry=dry), **arguments}
        self._llm = LLM(model=_model(shape, drawn=drawn), **common)
        self._engine: Any = self._llm.llm_engine
        self.core: Any = self._engine.engine_core.engine_core
        self.scheduler: Any = self.core.scheduler
        self.vocab_size: int = SHAPES[shape]["vocab_size"]
        self.start_s = time.perf_counter() - began
        self.seen: dict[str, Seen] = {}
        self._number = 0

    def now(self) -> float:
        """Return the seconds of this engine's clock."""
        return time.perf_counter()

    def add(
        self, prompt: Sequence[int], output: int, *, arrival_s: float | None = None, logprobs: int | None = None
    ) -> str:
        """Hand in a request of token ids that ends after so many tokens; return its id."""
        self._number += 1
        req_id = f"r{self._number}"
        params = self._params(max_tokens=output, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=logprobs)
        self.seen[req_id] = Seen(self.now() if arrival_s is None else arrival_s)
        self._engine.add_request(req_id, {"prompt_token_ids": list(prompt)}, params)
        return req_id

    def step(self) -> None:
        """Let the engine take a step, and note what came of it."""
        outputs = self._engine.step()
        now = self.now()
        for output in outputs:
            seen, (one, *_) = self.seen[output.request_id], output.outputs
            new = len(one.token_ids) - len(seen.token_times_s)
            seen.token_times_s += [now] * new
            seen.token_ids, seen.ended = list(one.token_ids), output.finished
            if output.finished and one.logprobs:
                seen.likely = [{token: said.logprob for token, said in place.items()} for place in one.logprobs]
                seen.logprobs = [place[token] for place, token in zip(seen.likely, one.token_ids, strict=True)]

    def finish(self) -> None:
        """Step until nothing is left."""
        while self._engine.has_unfinished_requests():
            self.step()

    def abort(self, req_ids: Iterable[str]) -> None:
        """End requests, and step until the engine has let go of them."""
        ids = list(req_ids)
        self._engine.abort_request(ids)
        self.finish()
        for req_id in ids:
            self.seen[req_id].aborted = not self.seen[req_id].ended

    def abort_all(self) -> None:
        """End whatever is left."""
        self.abort(req_id for req_id, seen in self.seen.items() if not (seen.ended or seen.aborted))

    @property
    def in_flight(self) -> int:
        """Steps that are under way when another is planned: 1 with async scheduling, else 0."""
        return int(self.core.batch_queue is not None)

    @property
    def cudagraph_mode(self) -> str:
        """Return which steps are replayed as CUDA graphs, in vLLM's words; the attention backend has a say in it."""
        return str(self.core.vllm_config.compilation_config.cudagraph_mode.name)

    @property
    def compilation_mode(self) -> str:
        """Return how steps are compiled, in vLLM's words."""
        return str(self.core.vllm_config.compilation_config.mode.name)

    @property
    def is_busy(self) -> bool:
        """Whether requests are left."""
        return bool(self._engine.has_unfinished_requests())

    def counter(self, name: str) -> float:
        """Return a counter of vLLM's metrics, of an engine with ``disable_log_stats=False``; 0 if there is none."""
        return float(sum(getattr(metric, "value", 0.0) for metric in self._llm.get_metrics() if metric.name == name))

    def state(self) -> dict[str, Any]:
        """Return what our scheduler tells of itself; nothing of vLLM's own."""
        return dict(self.core.vllm_ext_state()) if hasattr(self.scheduler, "clock") else {}

    def close(self) -> None:
        """End workers and copies."""
        self.core.shutdown()

    def prompt(self, number: int, tokens: int) -> list[int]:
        """Return a prompt that shares no block with that of another number."""
        return [(number * 7919 + 31 * place * (number + 1)) % (self.vocab_size - 10) + 5 for place in range(tokens)]


def parse(description: str | None, argv: Sequence[str], settings: Sequence[str]) -> argparse.Namespace:
    """Read the command line of a benchmark that starts an engine for each of some settings; see `on_gpu.parsed`."""
    parser = on_gpu.argument_parser(description)
    parser.add_argument("--settings", type=_listed(settings), default=",".join(settings),
                        help="of them, in this order (default: %(default)s)")  # fmt: skip
    parser.add_argument("--one", choices=settings, help=argparse.SUPPRESS)
    parser.add_argument("--limit-s", type=float, default=60.0, help="for one engine (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="engines beside each other, which share "
                        "the device: of what they answer, not how fast (default: %(default)s)")  # fmt: skip
    return on_gpu.parsed(parser, argv)


def in_processes(script: str, args: argparse.Namespace, report: on_gpu.Report) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what a script writes for each setting, each in a process of its own: one that dies takes nobody along.

    The report has it under ``settings``, while a process runs as well, and is written whenever something was added.
    Every result has ``seconds``, ``problems`` and ``complete``, and the end of what was printed where the process
    failed. A setting that is named twice is another engine: "stock, again". They come in the order of the settings,
    also where several run at once.
    """
    settings: dict[str, dict[str, Any]] = report.found.setdefault("settings", {})
    with TemporaryDirectory() as folder, ExitStack() as stack:
        waiting = [*enumerate(args.settings)]
        running: list[_Process] = []
        while waiting or running:
            while waiting and sum(not one.ended for one in running) < args.at_once:
                number, setting = waiting.pop(0)
                name = f"{setting}, again" if setting in settings else setting
                out = Path(folder, f"{number}.json")
                options = ["--one", setting, "--out", str(out), "--seed", str(args.seed)]
                options += ["--at-once", str(args.at_once), *(["--dry"] if args.dry else [])]
                running.append(_Process(name, [sys.executable, script, *options], out, args.limit_s))
                stack.callback(running[-1].kill)
                settings[name] = running[-1].found()
            for one in running:
                if not one.ended and one.has_news():
                    settings[one.name] = one.found()
                    report.write()
            while running and running[0].ended:
                name = running.pop(0).name
                yield name, settings[name]
                report.write()
            if running:
                time.sleep(_POLL_S)


def all_complete(report: on_gpu.Report) -> bool:
    """Whether all engines ran to their end, and did what was to be measured."""
    return all(one["complete"] and not one["problems"] for one in report.found["settings"].values())


class _Process:
    """A process of one engine, until its end or its limit.

    Args:
        name: Of the engine.
        command: Starts it.
        out: The file that it writes.
        limit_s: After which it is killed.
    """

    def __init__(self, name: str, command: Sequence[str], out: Path, limit_s: float) -> None:
        self.name, self.ended = name, False
        self._out, self._limit_s, self._began = out, limit_s, time.perf_counter()
        self._log, self._before, self._failure = out.with_suffix(".log"), b"", ""
        with self._log.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def has_news(self) -> bool:
        """Whether it wrote something, or has `ended`; at its limit it is killed."""
        self.seconds = time.perf_counter() - self._began
        status = self._process.poll()
        if status is None and self.seconds >= self._limit_s:
            self.kill()
            self._failure = f"not done in {self._limit_s:g} s; "
        elif status:
            self._failure = f"status {status}; "
        self.ended = status is not None or bool(self._failure)
        before, self._before = self._before, self._out.read_bytes() if self._out.exists() else b""
        return self.ended or self._before != before

    def kill(self) -> None:
        """End it, if it has not ended."""
        self._process.kill()
        self._process.wait()

    def found(self) -> dict[str, Any]:
        """Return what it wrote so far; of one that ended, seconds and what was printed before a failure as well."""
        found = _read(self._out)
        if self.ended:
            found["seconds"] = round(self.seconds, 1)
        if self._failure:
            found["problems"] = ["the engine failed", *found["problems"]]
            text = self._failure + self._log.read_text(errors="replace")[-_TAIL_CHARS:]
            found |= {"complete": False, "tail": text}
        return found


def _read(out: Path) -> dict[str, Any]:
    """Return what a process wrote so far."""
    return {"problems": [], "complete": False} | (json.loads(out.read_bytes()) if out.exists() else {})


def _listed(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return what takes a list of some names apart."""

    def names(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)!r} unknown, must be of {', '.join(known)}")
        return found

    return names


def _model(shape: str, *, drawn: bool) -> str:
    """Return the folder of a model; with weights if those are to be such that next tokens are clear choices."""
    folder = Path(gettempdir(), f"vllm-ext-{shape}")
    folder.mkdir(exist_ok=True)
    dtype = "float32" if shape == "dry" else "bfloat16"
    (folder / "config.json").write_text(json.dumps({**SHAPES[shape], "torch_dtype": dtype}))
    if drawn:
        import torch
        from safetensors.torch import save_file

        generator = torch.Generator().manual_seed(0)
        weights = {
            name: torch.randn(sizes, generator=generator).mul_(sizes[-1] ** -0.5).to(getattr(torch, dtype))
            if len(sizes) > 1
            else torch.ones(sizes, dtype=getattr(torch, dtype))
            for name, sizes in _sizes(SHAPES[shape])
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def _sizes(shape: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and sizes of a Llama's weights."""
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    yield from ((f"{name}.weight", (shape["vocab_size"], hidden)) for name in ("model.embed_tokens", "lm_head"))
    yield "model.norm.weight", (hidden,)
    matrices = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    for layer in range(shape["num_hidden_layers"]):
        yield from ((f"model.layers.{layer}.{name}.weight", sizes) for name, sizes in matrices.items())


def _common(*, dry: bool) -> dict[str, Any]:
    common: dict[str, Any] = {
        "skip_tokenizer_init": True, "disable_log_stats": True, "enable_prefix_caching": False,
        "seed": 0, "max_num_seqs": 256, "block_size": 32, "max_model_len": 16384 + 512,
    }  # fmt: skip
    if dry:
        return common | {
            "dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "kv_cache_memory_bytes": _DRY_BYTES,
            "enforce_eager": True,
        }  # fmt: skip
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": _GRAPH_SIZES}
    return common | {"dtype": "bfloat16", "gpu_memory_utilization": 0.85, "compilation_config": graphs}


def _scaled(setting: dict[str, Any], *, dry: bool) -> dict[str, Any]:
    """Return a setting with a host tier that fits the machine."""
    options = setting.get("additional_config", {}).get("vllm_ext", {})
    if not dry or "gib" not in options.get("kv_tier", {}):
        return setting
    tier = {**options["kv_tier"], "gib": 0.01}
    return {**setting, "additional_config": {"vllm_ext": {**options, "kv_tier": tier}}}
