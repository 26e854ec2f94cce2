"""Token ids of prompts: a system prompt, a history, blocks of a recorded prefix, or what nobody else sends.

Ids lie in [100, 4096), which leaves out the end token (2) and those that made-up outputs use. What is numbered (a
conversation, a block) begins with its number in base 3996, the least digit first: the first 3996 differ in their first
token, the first 16 million in the first two. So no block of a KV cache is shared by accident. What follows the number
is read from one table at a place that depends on the number: cheap, and as good as random ids, because a cached block
is known by all tokens up to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from vllm_ext.simulation.workloads.randomness import Purpose, generator

EOS_TOKEN_ID = 2
"""The token that ends a request at its hidden length."""
FILLER_TOKEN_ID = 16
"""Every sampled token but the last: what was generated is then known without being stored."""
FIRST_ID = 100
END_ID = 4096
_BASE = END_ID - FIRST_ID
_DIGITS = 3
_STRIDE = 1009
_TABLE_SIZE = 1 << 15
_SYSTEM, _NUMBERED, _ADDED, _BLOCK, _ALONE = range(5)


def system_prompt(count: int) -> list[int]:
    """Return the ids that all prompts begin with; a longer one begins with a shorter one."""
    return _from_table(_SYSTEM, 0, count)


def opening(number: int, count: int) -> list[int]:
    """Return ids of which no other number's are a beginning."""
    return _numbered(_NUMBERED, number, count)


def alone(number: int, count: int) -> list[int]:
    """Return ids for a request that comes with none: other than any number's, and than any opening."""
    return _numbered(_ALONE, number, count)


def added(number: int, turn: int, count: int) -> list[int]:
    """Return what a later turn of a conversation adds."""
    return _from_table(_ADDED, number + turn, count)


def output_ids(num_tokens: int, ended: bool) -> list[int]:
    """Return the tokens a request generated: filler, and the end token if it ended by itself."""
    return [FILLER_TOKEN_ID] * (num_tokens - ended) + [EOS_TOKEN_ID] * ended


def of_turn(number: int, earlier: Sequence[tuple[int, int]], count: int) -> list[int]:
    """Return the ``count`` ids of a turn's prompt: the last turn's prompt and answer as far as they fit, then new ones.

    Args:
        number: The conversation's; no opening has it.
        earlier: Prompt and output length of each turn before, in tokens.
        count: Of the prompt.
    """
    ids: list[int] = []
    for turn, (prompt_tokens, output_tokens) in enumerate(earlier):
        ids = _grown(ids, number, turn, prompt_tokens) + output_ids(output_tokens, ended=True)
    return _grown(ids, number, len(earlier), count)


def _grown(ids: list[int], number: int, turn: int, count: int) -> list[int]:
    missing = count - len(ids)
    if missing <= 0:
        return ids[:count]
    return ids + (added(number, turn, missing) if turn else opening(number, missing))


def of_blocks(hash_ids: Sequence[int], count: int, block_tokens: int) -> list[int]:
    """Return ``count`` ids, of which each block is made from its hash id alone; the last may be partial."""
    ids: list[int] = []
    for hash_id in hash_ids[: -(-count // block_tokens)]:
        ids.extend(_numbered(_BLOCK, hash_id, block_tokens))
    return ids[:count]


def _numbered(kind: int, number: int, count: int) -> list[int]:
    digits = []
    rest = number
    for _ in range(min(_DIGITS, count)):
        rest, digit = divmod(rest, _BASE)
        digits.append(FIRST_ID + digit)
    return digits + _from_table(kind, number, count - len(digits))


def _from_table(kind: int, number: int, count: int) -> list[int]:
    table = _table(kind)
    start = number * _STRIDE % _TABLE_SIZE
    end = start + count
    if end > _TABLE_SIZE:
        table = table * -(-end // _TABLE_SIZE)
    return table[start:end]


@cache
def _table(kind: int) -> list[int]:
    """Random ids; lists cut from them share their integer objects, so that a list costs 8 bytes a token."""
    shared = tuple(range(END_ID))
    numbers = generator(0, Purpose.TOKEN_IDS, kind).integers(FIRST_ID, END_ID, size=_TABLE_SIZE)
    return [shared[number] for number in numbers.tolist()]
