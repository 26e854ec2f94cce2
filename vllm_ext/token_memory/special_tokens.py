"""Reads from a tokenizer at which special tokens it cuts a text, whatever stands around them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_AROUND = (("", "a"), ("Hello there", "user\nHi"), ("x \n", "\n\n y"), ("1", "2"), ("def f(", " g)"))
"""Texts before and behind a special token with which each is tried."""


class Unsuitable(ValueError):
    """Texts of this tokenizer can't be put together from parts."""


def read(tokenizer: Any) -> dict[str, int]:
    """Return id by content of the special tokens at which texts can be cut.

    Cut in front of one, ids of both parts are those of the whole, and decoding gives the text back. Each is tried.

    Args:
        tokenizer: Of transformers, with a Rust tokenizer inside.

    Raises:
        Unsuitable: There is no such token.
    """
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if not getattr(tokenizer, "is_fast", False) or not isinstance(added, Mapping):
        raise Unsuitable(f"{type(tokenizer).__name__} is no fast tokenizer of transformers")
    plain = {
        token.content: number
        for number, token in added.items()
        if not (token.lstrip or token.rstrip or token.single_word or token.normalized)
    }
    apart = standing_apart([token.content for token in added.values()])
    found = {content: plain[content] for content in plain if content in apart and _cuts(tokenizer, content, added)}
    if not found:
        raise Unsuitable(
            f"none of its {len(added)} added tokens cuts a text so that both parts keep their ids and decode"
        )
    return found


def front(tokenizer: Any) -> list[int] | None:
    """Return the ids that the tokenizer puts before a text with ``add_special_tokens``; None if it does more."""
    text = "Hello there"
    whole, plain = (tokenizer(text, add_special_tokens=special)["input_ids"] for special in (True, False))
    ids: list[int] = whole[: len(whole) - len(plain)]
    return ids if whole == ids + plain else None


def standing_apart(contents: Iterable[str]) -> set[str]:
    """Return those that a search from left to right finds wherever they stand: no other overlaps with their beginning.

    Args:
        contents: Of all tokens that are searched for.
    """
    contents = set(contents)
    joined = "\0".join(contents)
    ends = {content[cut:] for content in contents for cut in range(1, len(content))}
    return {
        content
        for content in contents
        if content.strip() == content != ""
        and joined.count(content) == 1
        and not any(content[:cut] in ends for cut in range(1, len(content)))
    }


def decode(tokenizer: Any, ids: list[int]) -> str:
    """Return the text of ids, with special tokens and unchanged spaces."""
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _cuts(tokenizer: Any, content: str, added: Mapping[int, Any]) -> bool:
    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    for before, behind in _AROUND:
        ids, rest = encode(before + content + behind), encode(content + behind)
        if ids != encode(before) + rest or decode(tokenizer, ids) != before + content + behind:
            return False
        if rest[0] not in added or added[rest[0]].content != content:
            return False
    return True
