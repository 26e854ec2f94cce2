"""How much of a conversation's history is found if it comes as text, and what does it cost to make ids of it?

Question: a client sends the history as text with each turn. Of some answers the tokenizer makes other ids than the
model generated, and KV behind these is not found. Does the token memory (`--ext-token-memory`) find as much as a client
that sends the ids themselves, and is it quick?

Method: the real engine with a tiny Llama, prefix caching and blocks of 32 tokens. Text is the docstrings of the
installed SciPy: a byte-level BPE with the splits of Llama 3 and Qwen is trained on it, and answers are sampled at T = 1
from an interpolated trigram model of its tokens, put into the engine as a logits processor. ChatML template; questions
begin docstrings that neither has seen. Rows: `text` (LLM.chat of stock vLLM), `memory` (the same with the memory),
`ids` (prompts of ids, put together by the client). Answers are the same in all, by seeds. Found is what vLLM says was
cached, over the ids of last prompts and answers. Every prompt must decode to its text.
Time, least of several in turn: `tokenizer`, its own call on a history of 100,000 tokens; `lookup`, the history's ids
from the memory, as a list; `next_prompt`, all that vLLM does to make ids of the history and a new turn, which the
memory learns; `stock_prompt`, the same without a memory; `unknown_prompt`, with one that knows nothing of it; and
learning an answer of 1,000 tokens.

    python benchmarks/engine/token_memory.py --quick
    python benchmarks/engine/token_memory.py --out benchmarks/results/token_memory.json
"""

from __future__ import annotations

import ast
import collections
import functools
import hashlib
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from vllm import LLM, SamplingParams
from vllm.renderers.params import TokenizeParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from vllm_ext.report.claim import Claim
from vllm_ext.report.results import Result, Workload, argument_parser, command, emit
from vllm_ext.report.table import Table

SPECIAL = PAD, START, END, THINK, THOUGHT = ("<|end|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPLITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
VOCABULARY, QUESTION_CHARS, ANSWER_TOKENS, BLOCK = 4096, 300, 160, 32
TEXT, MEMORY, IDS = ROWS = ("text", "memory", "ids")
HISTORY_TOKENS, MESSAGE_CHARS = 100_000, 1500
_HELD_OUT_OF, _END_ID, _SEED = 5, 2, "answer_seed"
_UNEXPLAINED = "not explained yet"
Message = dict[str, str]


def docstrings(every: int) -> list[str]:
    """Return docstrings of some length of every so many-th file of SciPy, in their order."""
    spec = importlib.util.find_spec("scipy")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    assert folder is not None, "SciPy is a dependency"
    found: dict[str, None] = {}
    for file in sorted(folder.rglob("*.py"))[::every]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node) or ""
                if len(text) >= QUESTION_CHARS:
                    found[text] = None
    return list(found)


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer with the splits of Llama 3 and Qwen, and ChatML."""
    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLITS), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(content, special=True, normalized=False) for content in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    found = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=PAD)
    found.chat_template = TEMPLATE
    return found


def save_model(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a tiny random Llama; what it says does not matter, its KV does."""
    torch.manual_seed(0)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        eos_token_id=_END_ID,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


class Trigrams:
    """Interpolated trigram model of texts in tokens, with Witten-Bell weights: the unseen get a share by kinds seen."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> None:
        ones = np.full(len(tokenizer), 0.02)
        self._followers: dict[tuple[int, ...], collections.Counter[int]] = collections.defaultdict(collections.Counter)
        for text in texts:
            ids = [1, 1, *tokenizer.encode(text, add_special_tokens=False), _END_ID]
            np.add.at(ones, ids[2:], 1)
            for first, second, third in zip(ids, ids[1:], ids[2:], strict=False):
                self._followers[second,][third] += 1
                self._followers[first, second][third] += 1
        ones[[0, 1, 3, 4]] = 0
        self._ones = ones / ones.sum()

    def log_probabilities(self, output: Sequence[int]) -> torch.Tensor:
        """Return those of the next token, shape [vocabulary]."""
        first, second = [1, 1, *output[-2:]][-2:]
        p = self._ones.copy()
        for context in ((second,), (first, second)):
            if counts := self._followers.get(context):
                total, kinds = sum(counts.values()), len(counts)
                p *= kinds / (total + kinds)
                p[list(counts)] += np.fromiter(counts.values(), float) / (total + kinds)
        return torch.from_numpy(np.log(p + 1e-12)).float()


class Says(AdapterLogitsProcessor):
    """Puts a trigram model in the place of the engine's logits, with the noise whose largest is a sample at T = 1.

    Seeds of vLLM's own end the engine where a prompt is computed in parts: its CPU generators can't be set back.
    """

    trigrams: Trigrams

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
        seed = (params.extra_args or {})[_SEED]

        def noisy(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            noise = np.random.default_rng((seed, len(output))).gumbel(size=len(logits))
            return self.trigrams.log_probabilities(output) + torch.from_numpy(noise).float()

        return noisy


def engine(model: Path, seats: int, *, memory: bool) -> LLM:
    """Return the real engine, stock but for the memory."""
    chosen = {"scheduler_cls": "fcfs", "additional_config": {"vllm_ext": {"token_memory_mib": 64}}} if memory else {}
    return LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        block_size=BLOCK,
        max_num_seqs=seats,
        kv_cache_memory_bytes=512 << 20,
        logits_processors=[Says],
        seed=0,
        **chosen,
    )


class Chat:
    """A conversation, by its texts and by its ids."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.ids: list[int] = []
        """Of the last prompt and answer."""


def serve(llm: LLM, tokenizer: PreTrainedTokenizerFast, questions: Sequence[Sequence[str]], row: str) -> Counts:
    """Serve all conversations, turn by turn, and return sums."""
    llm.reset_prefix_cache()
    counts, chats = Counts(), [Chat() for _ in questions]
    for turn in range(len(questions[0])):
        for chat, asked in zip(chats, questions, strict=True):
            chat.messages.append({"role": "user", "content": asked[turn]})
        sampling = [
            SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, extra_args={_SEED: 100 * number + turn})
            for number in range(len(chats))
        ]
        if row == IDS:
            prompts = [{"prompt_token_ids": of_ids(tokenizer, chat)} for chat in chats]
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
        else:
            outputs = llm.chat([chat.messages for chat in chats], sampling, use_tqdm=False)
        for chat, output in zip(chats, outputs, strict=True):
            counts.take(tokenizer, chat, output)
    return counts


def of_ids(tokenizer: PreTrainedTokenizerFast, chat: Chat) -> list[int]:
    """Return the prompt that a client puts together which keeps all ids."""
    ended = "" if not chat.ids else "\n" if chat.ids[-1] == _END_ID else f"{END}\n"
    new = f"{ended}{START}user\n{chat.messages[-1]['content']}{END}\n{START}assistant\n"
    return [*chat.ids, *tokenizer.encode(new, add_special_tokens=False)]


class Counts(collections.Counter[str]):
    """Sums over turns."""

    def take(self, tokenizer: PreTrainedTokenizerFast, chat: Chat, output: Any) -> None:
        """Add a turn that ended, and put its answer into its conversation.

        Raises:
            RuntimeError: Its prompt was not that of the messages.
        """
        prompt, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        rendered = tokenizer.apply_chat_template(chat.messages, add_generation_prompt=True, tokenize=False)
        if tokenizer.decode(prompt) != rendered:
            raise RuntimeError(f"a prompt does not decode to its text: {rendered!r}")
        self.update(history=len(chat.ids), cached=output.num_cached_tokens if chat.ids else 0)
        chat.ids = prompt + answer
        chat.messages.append({"role": "assistant", "content": output.outputs[0].text})
        again = tokenizer.encode(tokenizer.apply_chat_template(chat.messages, tokenize=False), add_special_tokens=False)
        self.update(turns=1, turns_differ=again[: len(chat.ids)] != chat.ids, generated=len(answer))

    def metrics(self) -> dict[str, float]:
        return {
            "history_found_share": round(self["cached"] / self["history"], 5),
            "turns_of_other_ids_share": round(self["turns_differ"] / self["turns"], 4),
            "generated_tokens": self["generated"],
        }


def times(llm: LLM, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], repeats: int) -> dict[str, float]:
    """Return how long it takes to make ids of a long history, in milliseconds."""
    renderer = llm.llm_engine.renderer
    attached = renderer._vllm_ext_token_memory
    memory = attached._memory
    messages: list[Message] = []
    length, pieces = 0, pieces_of(texts)
    while length < HISTORY_TOKENS:
        messages.append({"role": ("user", "assistant")[len(messages) % 2], "content": next(pieces)})
        length += len(tokenizer.encode(messages[-1]["content"])) + 5
    history = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = tokenizer.encode(history, add_special_tokens=False)
    render = functools.partial(
        renderer.render_cmpl, tok_params=TokenizeParams(max_total_tokens=None, add_special_tokens=False)
    )
    render([{"prompt": history}])  # learned
    prefix, known, rest = memory.find(history, "")
    if known + tokenizer.encode(rest, add_special_tokens=False) != ids or rest != f"{END}\n":
        raise RuntimeError("what was learned of a history is not what the tokenizer made of it")
    answer = tokenizer.encode(texts[0], add_special_tokens=False)[:1000]
    least: dict[str, float] = collections.defaultdict(lambda: float("inf"))
    for number in range(repeats):
        turn = f"{history}{START}user\n{number} {texts[number][:QUESTION_CHARS]}{END}\n{START}assistant\n"
        calls: Mapping[str, Callable[[], object]] = {
            "tokenizer": functools.partial(tokenizer, history, add_special_tokens=False),
            "lookup": functools.partial(memory.find, history, ""),
            "next_prompt": functools.partial(render, [{"prompt": turn}]),
            "stock_prompt": functools.partial(render, [{"prompt": turn}]),
            "unknown_prompt": functools.partial(render, [{"prompt": turn, "cache_salt": f"{number}"}]),
            "answer_of_1000_tokens": functools.partial(memory.learn, prefix, rest, ids[len(known) :], answer),
        }
        for name, call in calls.items():
            renderer._vllm_ext_token_memory = None if name == "stock_prompt" else attached
            begun = time.perf_counter()
            call()
            least[name] = min(least[name], time.perf_counter() - begun)
    return {
        "history_tokens": len(known),
        "history_messages": len(messages),
        **{f"{name}_ms": round(1e3 * seconds, 3) for name, seconds in least.items()},
        "lookup_over_tokenizer": round(least["lookup"] / least["tokenizer"], 5),
    }


def pieces_of(texts: Sequence[str]) -> Iterator[str]:
    """Yield pieces of about the same length."""
    whole = "\n\n".join(texts)
    for start in range(0, len(whole), MESSAGE_CHARS):
        yield whole[start : start + MESSAGE_CHARS]


def main(argv: Sequence[str]) -> None:
    """Serve all rows, measure, print, write."""
    parser = argument_parser(__doc__)
    args = parser.parse_args(argv)
    num_chats, num_turns, repeats, every = (16, 3, 5, 4) if args.quick else (100, 4, 20, 1)
    texts = docstrings(every)
    held_out = texts[args.seed % _HELD_OUT_OF :: _HELD_OUT_OF]
    learned = [text for number, text in enumerate(texts) if number % _HELD_OUT_OF != args.seed % _HELD_OUT_OF]
    tokenizer = make_tokenizer(learned)
    Says.trigrams = Trigrams(tokenizer, learned)
    pieces = [text[:QUESTION_CHARS] for text in held_out]
    questions = [pieces[number * num_turns : (number + 1) * num_turns] for number in range(num_chats)]
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(tokenizer, Path(folder))
        stock = engine(Path(folder), min(num_chats, 50), memory=False)
        found[TEXT], found[IDS] = (serve(stock, tokenizer, questions, row).metrics() for row in (TEXT, IDS))
        del stock
        ours = engine(Path(folder), min(num_chats, 50), memory=True)
        found[MEMORY] = serve(ours, tokenizer, questions, MEMORY).metrics()
        seconds = times(ours, tokenizer, texts, repeats)
    behind = round(found[IDS]["history_found_share"] - found[MEMORY]["history_found_share"], 5)
    claims = [
        Claim(name="history_found_share, ids less memory", value=behind, op="<=", goal=0.005, facts=_UNEXPLAINED),
        Claim(
            name="lookup_over_tokenizer",
            value=seconds["lookup_over_tokenizer"],
            op="<=",
            goal=0.01,
            facts=_UNEXPLAINED,
        ),
    ]
    result = Result(
        name="token_memory",
        command=command(argv, __file__),
        config={"chats": num_chats, "turns": num_turns, "vocabulary": VOCABULARY, "block_tokens": BLOCK},
        seed=args.seed,
        workload=Workload(
            name="docstrings of SciPy", rows=len(texts), sha256=hashlib.sha256("\0".join(texts).encode()).hexdigest()
        ),
        metrics={**{f"memory.{name}": value for name, value in found[MEMORY].items()}, **seconds},
        baselines={row: {f"{name}": value for name, value in found[row].items()} for row in (TEXT, IDS)},
        claims=claims,
    )
    rows = [[row, *found[row].values()] for row in ROWS]
    costs = Table(["a history of 100,000 tokens", ""], [[name, value] for name, value in seconds.items()])
    emit(result, [Table(["history sent as", *found[TEXT]], rows), costs], args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
