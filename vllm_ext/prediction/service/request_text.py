"""From a request in the front end to the text that is sent to the predictor: quick, and short whatever was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_ext.prediction.prompt_text import PromptText

_SEARCHED_CHARS = 1 << 16
"""Characters at either end of a rendered prompt in which the turns of a chat are looked for."""
_CHARS_PER_TOKEN = 16
"""Characters sent per token of the encoder's window; as the encoder's own cut, so nothing it would see is missing."""


class RequestTexts:
    """Makes the texts of one server's requests."""

    def __init__(self, rule: PromptText) -> None:
        self._rule = rule
        self._half = min(rule.max_tokens * _CHARS_PER_TOKEN, _SEARCHED_CHARS)  # else no frame could hold it

    def of(
        self,
        prompt: str | None,
        token_ids: Sequence[int] | None,
        messages: Sequence[Mapping[str, object]] | None,
        tokenizer: Any,
    ) -> str | None:
        """Return the text, cut in its middle and fit for UTF-8, or None if nothing is known that could be read.

        Args:
            prompt: As text, rendered where it is a chat.
            token_ids: As tokens of the served model.
            messages: The chat as the client sent it, where it is one.
            tokenizer: Of the served model; None without one.
        """
        text = self._of_chat(messages)
        if text is None:
            decode = None if tokenizer is None else lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
            text = self._rule.of(prompt=None if prompt is None else _ends(prompt, _SEARCHED_CHARS),
                                 token_ids=token_ids, decode=decode)  # fmt: skip
        # A lone surrogate, which JSON may hold, can't be sent.
        return None if text is None else _ends(text, self._half).encode("utf-8", "replace").decode()

    def _of_chat(self, messages: Sequence[Mapping[str, object]] | None) -> str | None:
        if not messages:
            return None
        try:
            return self._rule.from_messages(messages)
        except ValueError:  # of a form that only vLLM understands: the rendered prompt will do
            return None


def _ends(text: str, half: int) -> str:
    return text if len(text) <= 2 * half else f"{text[:half]}\n{text[-half:]}"
