"""Joins the token memory to an engine's front end: prompts before they are tokenised, requests when they end."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from vllm_ext.token_memory import special_tokens
from vllm_ext.token_memory.memory import Prefix, TokenMemory
from vllm_ext.token_memory.metrics import TokenMemoryMetrics
from vllm_ext.token_memory.special_tokens import Unsuitable

logger = logging.getLogger("vllm.vllm_ext.token_memory")

ATTRIBUTE = "_vllm_ext_token_memory"
"""Of a renderer that has one."""
CHECK_EVERY = 256
"""Of so many prompts put together one is decoded and compared, the first among them."""


class TokenizedText(str):
    """A prompt's text that went through the tokenizer here, with how far its ids are known.

    vLLM hands it on to the state of the request, where it tells such prompts from ids that a client sent.
    """

    memory: PromptMemory
    prefix: Prefix
    num_front: int

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Outputs of requests have it, which may go to other processes."""
        return str, (str(self),)

    def ended(self, state: Any) -> None:
        """Learn what a request generated; ``state`` is vLLM's ``RequestState`` of it."""
        self.memory.ended(self, state.prompt_token_ids, state.detokenizer.output_token_ids)


class PromptMemory:
    """The token memory of one tokenizer."""

    def __init__(self, tokenizer: Any, num_ids: int, max_bytes: int, metrics: TokenMemoryMetrics) -> None:
        """Read the tokenizer.

        Args:
            tokenizer: Of the renderer.
            num_ids: Ids of prompts and generated tokens are below it.
            max_bytes: Room for ids.
            metrics: Counts.

        Raises:
            Unsuitable: The tokenizer is none whose ids can be put together.
        """
        self.special_tokens = special_tokens.read(tokenizer)
        self._decode = functools.partial(special_tokens.decode, tokenizer)
        self._fronts = {False: [], True: special_tokens.front(tokenizer)}
        self._memory = TokenMemory(self.special_tokens, self._decode, num_ids, max_bytes)
        self._metrics = metrics
        self._count = itertools.count()
        self._off = False

    def tokenize(self, tokenize: Callable[[Any, Any], Any], prompt: Mapping[str, Any], params: Any, salt: str) -> Any:
        """Return what vLLM's ``_tokenize_prompt`` returns, with known ids in it; None if the tokenizer must do it all.

        Args:
            tokenize: That function.
            prompt: vLLM's ``TextPrompt``.
            params: vLLM's ``TokenizeParams``.
            salt: The request's ``cache_salt``, or empty.
        """
        front = self._fronts[params.add_special_tokens]
        if self._off or front is None or _needs_tokenizer(prompt, params):
            self._metrics.refused()
            return None
        text = prompt["prompt"]
        try:
            prefix, known, rest = self._memory.find(text, salt)
        except UnicodeEncodeError:  # lone surrogates, which the tokenizer refuses
            return None
        if known:
            # Truncated, too: what then has max_input_tokens is too long with the known ids before it.
            made = tokenize({**prompt, "prompt": rest}, dataclasses.replace(params, add_special_tokens=False))
            new = made["prompt_token_ids"]
            made["prompt_token_ids"] = front + known + new
            most = params.max_input_tokens
            too_long = most is not None and len(made["prompt_token_ids"]) > most
            if too_long or not self._is_right(made["prompt_token_ids"], len(front), text):
                return None
        else:
            made = tokenize(prompt, params)
            new = made["prompt_token_ids"][len(front) :]
        self._metrics.looked_up(len(known), len(front) + len(new))
        marked = TokenizedText(text)
        marked.memory, marked.num_front = self, len(front)
        marked.prefix = self._memory.learn(prefix, rest, new)
        made["prompt"] = marked
        self._metrics.holds(self._memory.num_bytes)
        return made

    def ended(self, text: TokenizedText, prompt_ids: list[int], output_ids: list[int]) -> None:
        """Learn a request that ended: what it generated, behind what is known of its prompt."""
        known = text.prefix
        if output_ids and known.num_tokens and not self._off:  # else no special token cuts the prompt
            ids = prompt_ids[text.num_front + known.num_tokens :]
            self._memory.learn(known, text[known.num_chars :], ids, output_ids)
            self._metrics.holds(self._memory.num_bytes)

    def _is_right(self, ids: list[int], num_front: int, text: str) -> bool:
        if next(self._count) % CHECK_EVERY:
            return True
        self._metrics.checks.inc()
        if self._decode(ids[num_front:]) == text:
            return True
        self._metrics.mismatches.inc()
        self._off = True
        logger.error("token memory is off: ids of a prompt did not decode to its text; the tokenizer encoded it")
        return False


def _needs_tokenizer(prompt: Mapping[str, Any], params: Any) -> bool:
    """Whether ids are cut, padded, wanted with offsets, or replaced by those of images behind the tokenizer."""
    changed = params.truncate_prompt_tokens is not None or params.pad_prompt_tokens is not None
    data = prompt.get("multi_modal_data") or prompt.get("multi_modal_uuids")
    return changed or params.return_token_offsets or bool(data)


def attach(engine: Any, mib: int) -> None:
    """Give an engine's renderer a token memory; a model that can't have one is served without, which the log says.

    Args:
        engine: vLLM's ``AsyncLLM`` or ``LLMEngine``, fully made.
        mib: Room for ids, in MiB.
    """
    model, tokenizer = engine.vllm_config.model_config, engine.renderer.tokenizer
    served = model.served_model_name
    try:
        if model.runner_type != "generate" or model.is_encoder_decoder or model.enable_prompt_embeds or not tokenizer:
            raise Unsuitable("it is for decoders whose prompts are text")
        num_ids = max(tokenizer.max_token_id + 1, model.get_vocab_size())
        metrics = TokenMemoryMetrics(served if isinstance(served, str) else served[0])
        memory = PromptMemory(tokenizer, num_ids, mib << 20, metrics)
    except Exception as error:  # noqa: BLE001 - tokenizers bring code of their own; all are served without
        logger.warning("--ext-token-memory %d: off, every prompt is tokenised whole: %s", mib, error)
        return
    setattr(engine.renderer, ATTRIBUTE, memory)
    names = ", ".join(sorted(memory.special_tokens)[:8])
    logger.info(
        "token memory of %d MiB; texts are cut at %d special tokens: %s", mib, len(memory.special_tokens), names
    )
