"""How a turn is known that names no conversation: it begins with all of the last turn.

Where the template leaves out what the model thought, it begins with that turn's prompt only, and somewhere behind that
it has the end of the answer. The prompt alone would not do: many share a system prompt.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey

_MOST_TOKENS, _LEAST_TOKENS = 16, 8
"""Of an answer's end that are looked for. Fewer would be said by others, too; more may come back as other tokens."""
_MOST_ALIKE = 64
"""Conversations behind one prompt that are looked at, those that ended last."""
_ENCODING = f"utf-32-{sys.byteorder[0]}e"


class Salted(Protocol):
    """What a conversation has to have."""

    salt_tag: str


Conversation = TypeVar("Conversation", bound=Salted)


class Ending(NamedTuple):
    """What a turn left by which the next one is known, if that leaves out what was thought."""

    at: OffloadKey
    """The last but one chunk of its prompt: the last one may end within what the template adds for the answer."""
    prompt_tokens: int
    tokens: str
    """The end of the answer, a character for each token."""


def ending(prompt: Sequence[OffloadKey], prompt_tokens: int, output: Sequence[int]) -> Ending | None:
    """Return how the next turn is known; None if too little was said.

    Args:
        prompt: Whole chunks of the prompt, in order.
        prompt_tokens: Tokens of the prompt.
        output: What was generated. Its last token may be one that ends turns, which templates write in their own way.
    """
    said = _text(output[-_MOST_TOKENS - 1 : -1])
    if not prompt or len(said) < _LEAST_TOKENS:
        return None
    return Ending(prompt[-2 if len(prompt) > 1 else 0], prompt_tokens, said)


class Endings(Generic[Conversation]):
    """The last turns of conversations without a name."""

    def __init__(self) -> None:
        self._of: dict[Conversation, tuple[OffloadKey, Ending | None]] = {}
        """The last chunk of a turn, and how else its next one is known."""
        self._by_last: dict[OffloadKey, Conversation] = {}
        self._at: dict[OffloadKey, OrderedDict[Conversation, Ending]] = {}
        """Those whose prompts go on from a chunk, the one that ended last at the end."""

    def add(self, conversation: Conversation, last: OffloadKey, left: Ending | None) -> None:
        """Note what a conversation's last turn left."""
        self.forget(conversation)
        self._of[conversation] = last, left
        self._by_last[last] = conversation
        if left is not None:
            alike = self._at.setdefault(left.at, OrderedDict())
            alike[conversation] = left
            if len(alike) > _MOST_ALIKE:
                alike.popitem(last=False)

    def forget(self, conversation: Conversation) -> None:
        """Forget a conversation, if it is known."""
        last, left = self._of.pop(conversation, (None, None))
        if last is not None and self._by_last.get(last) is conversation:
            del self._by_last[last]
        if left is not None and (alike := self._at.get(left.at)) is not None:
            alike.pop(conversation, None)
            if not alike:
                del self._at[left.at]

    def find(self, salt_tag: str, keys: Sequence[OffloadKey], tokens: Sequence[int]) -> Conversation | None:
        """Return the conversation whose last turn a prompt goes on from; the longest, and of these the latest.

        Cost: one look-up for each chunk; behind one that conversations left, a search through the tokens for each.

        Args:
            salt_tag: Of the prompt's salt; another one's conversation is none.
            keys: Whole chunks of the prompt, in order.
            tokens: Of the prompt.
        """
        for key in reversed(keys):
            found = self._by_last.get(key)
            if found is not None and found.salt_tag == salt_tag:
                return found
        text = ""
        for key in reversed(keys):
            for found, left in reversed(self._at.get(key, {}).items()):
                text = text or _text(tokens)
                start = left.prompt_tokens - _MOST_TOKENS  # less what templates add to a prompt for its answer
                if text.find(left.tokens, max(0, start)) >= 0:
                    return found if found.salt_tag == salt_tag else None
        return None


def _text(tokens: Sequence[int]) -> str:
    """Return a character for each token: searched as bytes, tokens would also be found between two others.

    Empty, so that nothing is found, where ids are no characters: there are 1.1 million.
    """
    try:
        return array("i", tokens).tobytes().decode(_ENCODING, "surrogatepass")
    except ValueError:
        return ""
