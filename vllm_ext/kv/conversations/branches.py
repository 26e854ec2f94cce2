"""How much of what was generated next turns ask for: all of it, or little where a template leaves the thinking out.

Chunks are named by hashes of all tokens up to their end, so two prompts tell, whatever is stored of them: nobody has to
go on storing all for the sake of what is learned here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey

    from vllm_ext.kv.conversations.conversation import Conversation, Turn

_WEIGHT = 1 - 1 / 32
"""Of a turn, as a share of the one after it."""
_LEAST_TURNS = 8
"""Next turns seen before they count."""
_MOST_ORIGINS = 1024
"""LoRA adapters and salts remembered at most, those learned of last: clients invent salts."""
_MOST_LEFT, _MOST_CHUNKS = 8192, 64
"""Last turns remembered at most, those that ended last, and generated chunks of each, the first ones."""


class Branches:
    """What turns leave, and what the next ones contain of it, for each pair of LoRA adapter and salt.

    Attributes:
        counts: Generated chunks that next turns ``contained``, or ``omitted`` though long enough, and that were
            ``left_out`` when their requests ended.
    """

    def __init__(self) -> None:
        self.counts = dict.fromkeys(("contained", "omitted", "left_out"), 0)
        self._reuse: OrderedDict[tuple[str, str], tuple[int, float]] = OrderedDict()
        """Next turns seen, and weighted chunks that they contained less those that they omitted."""
        self._left: OrderedDict[Conversation, tuple[Turn | None, list[OffloadKey]]] = OrderedDict()
        """By conversation: its last turn, and its chunks from the prompt's last one on."""

    def is_low(self, origin: tuple[str, str]) -> bool:
        """Say whether next turns of a LoRA adapter and salt contain less than half of what was generated."""
        turns, balance = self._reuse.get(origin, (0, 0.0))
        return turns >= _LEAST_TURNS and balance < 0

    def state(self) -> dict[str, Any]:
        """Return what was learned, fit for JSON."""
        return {"low_reuse_salts": sum(map(self.is_low, self._reuse)), "generated_chunks": dict(self.counts)}

    def leave(self, turn: Turn, keys: Sequence[OffloadKey]) -> None:
        """Remember what a turn left: ``keys`` are all its chunks. Of samples side by side nobody knows who goes on."""
        if not turn.conversation.forked:
            self._left[turn.conversation] = turn, list(keys[max(0, turn.prompt_chunks - 1) :][: _MOST_CHUNKS + 1])
            _keep_last(self._left, turn.conversation, _MOST_LEFT)

    def enter(self, turn: Turn, keys: Sequence[OffloadKey]) -> OffloadKey | None:
        """Learn from a conversation's next turn.

        One whose prompt does not begin with the last one's, as of an agent beside the main one, says nothing.

        Args:
            turn: That begins.
            keys: Chunks of its prompt, in order.

        Returns:
            The first chunk of the branch that it leaves behind; None if it contains all that it could.
        """
        last, left = self._left.pop(turn.conversation, (None, []))
        if last is None:
            return None
        in_prompt = min(1, last.prompt_chunks)
        found = list(keys[last.prompt_chunks - in_prompt :])
        pairs = list(zip(left[in_prompt:], found[in_prompt:], strict=False))
        if not pairs or found[:in_prompt] != left[:in_prompt]:
            return None
        contained = sum(before == now for before, now in pairs)
        omitted = len(pairs) - contained
        self.counts["contained"] += contained
        self.counts["omitted"] += omitted
        turns, balance = self._reuse.get(turn.origin, (0, 0.0))
        self._reuse[turn.origin] = turns + 1, _WEIGHT * balance + contained - omitted
        _keep_last(self._reuse, turn.origin, _MOST_ORIGINS)
        if not omitted:
            return None
        last.kept_tokens = last.prompt_tokens
        return pairs[contained][0]


def _keep_last(entries: OrderedDict[Any, Any], key: object, most: int) -> None:
    entries.move_to_end(key)
    if len(entries) > most:
        entries.popitem(last=False)
