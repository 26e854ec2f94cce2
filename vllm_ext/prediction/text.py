"""The text that stands for a request when its output length is predicted: what the user asked for.

| known of the request | text |
|---|---|
| a completion prompt | the prompt |
| token ids only | their head and tail, decoded; nothing without a tokenizer |
| chat messages | a prefix of the system prompt, the last user turn, then earlier user turns, the latest first |
| a chat prompt already rendered | as chat messages, split at the tokenizer's special tokens; else the prompt itself |

The encoder averages over tokens, so a part's weight is its share of the text. A system prompt is the same for all
requests of a service, and often longer than the question: whole, it would make all requests look alike, so only a
prefix goes in, which still tells services apart. Earlier turns may take as much as the last one, or a few tokens where
that is short ("go on"). What the assistant said and what tools returned is left out.

Nothing is stored, and nothing heavy is imported.

Source: ALISE, Algorithm 1, embeds "input user prompts" and does not say what becomes of chats. The rules are ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

_CHARS_PER_TOKEN = 4
"""Of ASCII text, roughly; any other character counts as a token, as it does in an English vocabulary."""
_SENT_PER_TOKEN = 16
"""Characters sent per token of the encoder's window; as the encoder's own cut, so nothing it would see is missing."""
_SEARCHED_CHARS = 1 << 16
"""Characters at either end of a rendered prompt in which the turns of a chat are looked for."""
_SYSTEM_ROLES = frozenset({"system", "developer"})
_USER_ROLES = frozenset({"user", "human"})
_ANSWER_ROLES = frozenset({"assistant", "model"})
_LEAST_TOKENS = 8
"""A part of an earlier turn shorter than this says nothing."""
_MARKED = (
    ("/inst", "assistant"),
    ("inst", "user"),
    *((role, role) for role in ("system", "developer", "user", "assistant", "tool")),
)
"""Roles by what is found in a special token, as in ``<|user|>`` or ``[/INST]``."""
_NAMED = re.compile(r"\s*(system|developer|user|human|assistant|model|tool|ipython)[^\S\n]*(?:\n|\Z)")
"""A role after a special token, as in ``<|im_start|>user``, alone or on a line of its own."""

Message = Mapping[str, object]
"""``role`` (text) and ``content``: text, a list of parts, or None (an assistant's call of a tool)."""


class Read(NamedTuple):
    """What a request says."""

    text: str
    turn: int
    """Earlier turns: messages of the assistant in the prompt."""


@dataclass(frozen=True, kw_only=True)
class PromptText:
    """How a request becomes one text."""

    max_tokens: int = 256
    """Tokens that the encoder embeds; earlier turns stop there. Counted by a rule of thumb, not by a tokenizer."""

    system_chars: int = 100
    """Characters of the system prompt that are kept; 0 for none."""

    context_tokens: int = 32
    """Tokens that earlier user turns may take beside a last turn that is shorter than that."""

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", _LEAST_TOKENS), ("system_chars", 0), ("context_tokens", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r}: must be a whole number of at least {least}")

    def of(
        self,
        prompt: str | None = None,
        token_ids: Sequence[int] | None = None,
        messages: Sequence[Message] | None = None,
        tokenizer: Any = None,
    ) -> str | None:
        """Return the text of `read`, or None if nothing is known that could be read."""
        found = self.read(prompt, token_ids, messages, tokenizer)
        return None if found is None else found.text

    def read(
        self,
        prompt: str | None,
        token_ids: Sequence[int] | None,
        messages: Sequence[Message] | None,
        tokenizer: Any,
    ) -> Read | None:
        """Return the text, cut in its middle and fit for UTF-8, and the turn; None if nothing is known to be read.

        Messages say most, then the prompt's text, then its tokens. Messages of a form that only vLLM understands are
        read from the rendered prompt.

        Args:
            prompt: As text, of a completion or rendered from a chat.
            token_ids: As tokens of the served model.
            messages: The chat as the client sent it.
            tokenizer: Of the served model; None without one.
        """
        text = None
        turns: Sequence[Message] | None = messages
        if messages:
            with suppress(ValueError):
                text = self.from_messages(messages)
        if text is None and prompt is None and token_ids is not None and tokenizer is not None:
            size = self.max_tokens * 8  # enough for the turns and the marks around them
            ends = token_ids if len(token_ids) <= 2 * size else [*token_ids[:size], *token_ids[-size:]]
            prompt = str(tokenizer.decode(ends, skip_special_tokens=False))
        if text is None and prompt is not None:
            prompt = _ends(prompt, _SEARCHED_CHARS)
            turns = rendered_turns(prompt, tokenizer)
            text = prompt if turns is None else self.from_messages(turns)
        if text is None:
            return None
        # A lone surrogate, which JSON may hold, can't be sent.
        text = _ends(text, min(self.max_tokens * _SENT_PER_TOKEN, _SEARCHED_CHARS)).encode("utf-8", "replace").decode()
        return Read(text, sum(turn["role"] in _ANSWER_ROLES for turn in turns or ()))

    def from_messages(self, messages: Sequence[Message]) -> str:
        """Return the text of a chat; without any user's words, that of the last message that has some.

        Raises:
            ValueError: a message or a part is not of the form chats have.
        """
        turns = [(_role(m, i), _words(m.get("content"), f"messages[{i}].content")) for i, m in enumerate(messages)]
        users = [words for role, words in turns if role in _USER_ROLES and words]
        system = next((words for role, words in turns if role in _SYSTEM_ROLES and words), "")
        if not users:
            users = [words for role, words in turns if role not in _SYSTEM_ROLES and words][-1:]
        prefix = _prefix(system, self.system_chars)
        if not users:
            return prefix
        room = self.max_tokens - estimated_tokens(prefix) - estimated_tokens(users[-1])
        earlier = _earlier(users[:-1], min(room, max(self.context_tokens, estimated_tokens(users[-1]))))
        return "\n".join(part for part in (prefix, users[-1], *earlier) if part)


def rendered_turns(prompt: str, tokenizer: Any) -> list[dict[str, str]] | None:
    """Return the chat that a prompt was rendered from, or None if no user's turn is found.

    Split at the special tokens of the served tokenizer: they say whose words follow, or are followed by it. What stands
    before the first is the system's. Templates whose marks are plain words are not seen: such a prompt is its own text.

    Args:
        prompt: With its special tokens.
        tokenizer: Of the served model; without one there is nothing to split at.
    """
    marks = _marks(tokenizer)
    if marks is None:
        return None
    turns = [{"role": "system", "content": ""}]
    asked = False
    for number, piece in enumerate(marks.split(prompt)):
        words = piece
        role = None
        if number % 2:
            name = piece.lower()
            role = next((role for part, role in _MARKED if part in name), None)
            words = ""
        elif number and (found := _NAMED.match(piece)):
            role, words = found[1], piece[found.end() :]
        if role is not None:
            turns.append({"role": role, "content": ""})
            asked = asked or role in _USER_ROLES
        turns[-1]["content"] += " " + words
    turns = [{"role": turn["role"], "content": turn["content"].strip()} for turn in turns]
    return [turn for turn in turns if turn["content"]] if asked else None


@lru_cache(maxsize=4)  # a server has one tokenizer, or one per adapter
def _marks(tokenizer: Any) -> re.Pattern[str] | None:
    """Return a pattern of the special tokens, the longer ones first, in a group; None without any."""
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    found = {str(token) for token in (*added, *getattr(tokenizer, "all_special_tokens", ())) if str(token).strip()}
    return re.compile(f"({'|'.join(map(re.escape, sorted(found, key=len, reverse=True)))})") if found else None


def _ends(text: str, half: int) -> str:
    return text if len(text) <= 2 * half else f"{text[:half]}\n{text[-half:]}"


def _earlier(users: Sequence[str], room: float) -> list[str]:
    """Return the turns that fit into ``room`` tokens, the latest first; the last one of them may be cut."""
    kept = []
    for words in reversed(users):
        if room < _LEAST_TOKENS:
            break
        cut = _cut(words, room)
        kept.append(cut)
        room -= estimated_tokens(cut)
    return kept


def _cut(text: str, room: float) -> str:
    """Cut a text to about ``room`` tokens at its end."""
    text = text[: int(room * _CHARS_PER_TOKEN)]
    return text if estimated_tokens(text) <= room else text[: int(len(text) * room / estimated_tokens(text))]


def estimated_tokens(text: str) -> float:
    """Estimate the tokens of a text, from its first million characters."""
    text = text[:1_000_000]
    ascii_chars = len(text.encode("ascii", "ignore"))
    return ascii_chars / _CHARS_PER_TOKEN + len(text) - ascii_chars


def _prefix(system: str, chars: int) -> str:
    """Return the first ``chars`` characters of a system prompt with its blanks and line breaks folded."""
    return " ".join(system[: 4 * chars].split())[:chars].rstrip()


def _role(message: object, index: int) -> str:
    if not isinstance(message, Mapping) or not isinstance(role := message.get("role"), str):
        raise ValueError(f"messages[{index}]={_short(message)}: must be an object with the texts 'role' and 'content'")
    return role


def _words(content: object, where: str) -> str:
    """Return a message's text; parts that are no text leave a mark such as ``[image]``, as they shape the answer."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content.strip()
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise ValueError(f"{where}={_short(content)}: must be text, a list of parts, or null")
    return "\n".join(filter(None, (_part(part, f"{where}[{i}]") for i, part in enumerate(content))))


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part.strip()
    if not isinstance(part, Mapping):
        raise ValueError(f"{where}={_short(part)}: must be text or an object with 'type'")
    if isinstance(text := part.get("text"), str):
        return text.strip()
    kind = part.get("type")
    if not isinstance(kind, str):
        raise ValueError(f"{where}.type={_short(kind)}: must be text, such as 'text' or 'image_url'")
    return f"[{kind.removeprefix('input_').removesuffix('_url')}]"


def _short(value: object) -> str:
    """A value for an error: its type only, as a prompt must not end up in a log."""
    return f"<{type(value).__name__}>"
