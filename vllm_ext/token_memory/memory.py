"""Remembers the token ids of texts, to be found by the longest known beginning of a new text.

A text is cut where special tokens begin. The tokenizer cuts it there before it does anything else, so ids on both sides
do not depend on each other. Each segment is kept once, under a BLAKE3 of itself and of the key of what comes before it:
next turns, branches and shared system prompts share what they have in common. What is evicted first was used least
recently, and of one conversation that is its end.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from blake3 import blake3

SEGMENT_BYTES, ID_BYTES = 224, 8
"""Memory of a segment: a key, a tuple, a place in an ordered dictionary; and of each id."""
LEAST_BYTES = 16
"""Of a segment's text; where a special token comes sooner, as behind the end of a message, no new one begins."""


class Prefix(NamedTuple):
    """A beginning of a text whose ids are known; it ends where a special token begins, or is empty."""

    keys: tuple[bytes, ...]
    """Of its scope, then of its segments."""
    num_chars: int
    num_tokens: int


class TokenMemory:
    """Ids by text, within a number of bytes; may be used from several threads."""

    def __init__(
        self, special_tokens: Mapping[str, int], decode: Callable[[list[int]], str], num_ids: int, max_bytes: int
    ) -> None:
        """Start empty.

        Args:
            special_tokens: Id by content, of those that cut a text wherever they stand (`special_tokens.read`).
            decode: Returns the text of ids, special tokens included.
            num_ids: Ids are below it.
            max_bytes: Room for segments, at least 1.
        """
        self._pattern = re.compile(alternation(sorted(special_tokens)).encode())
        self._contents = {number: content.encode() for content, number in special_tokens.items()}
        self._decode = decode
        self._ints = list(range(num_ids))  # shared by all segments, where each int of its own takes 28 bytes more
        self._max_bytes = max_bytes
        self._segments: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        """Ids by key. Whatever touches a segment touches those before it later: they are evicted after it."""
        self._lock = threading.Lock()
        self.num_bytes = 0

    def find(self, text: str, scope: str) -> tuple[Prefix, list[int], str]:
        """Return the longest known prefix of a text, its ids, and the rest of the text.

        Args:
            text: Of a prompt, as the tokenizer gets it.
            scope: Nothing learned in another one is found.

        Raises:
            UnicodeEncodeError: The text has lone surrogates.
        """
        data = text.encode()
        keys, ids, start = [blake3(scope.encode("utf-8", "surrogatepass")).digest()], list[int](), 0
        for match in self._pattern.finditer(data):
            if match.start() - start < LEAST_BYTES:
                continue
            key = _key(keys[-1], data[start : match.start()])
            segment = self._segments.get(key)
            if segment is None:
                break
            keys.append(key)
            ids += segment
            start = match.start()
        with self._lock:
            self._touch(keys)
        rest = data[start:].decode()
        return Prefix(tuple(keys), len(text) - len(rest), len(ids)), ids, rest

    def learn(self, prefix: Prefix, text: str, ids: Sequence[int], generated: Sequence[int] = ()) -> Prefix:
        """Remember what follows a prefix, up to the last special token; with generated ids, to their end.

        Nothing is remembered if the ids don't decode to exactly the text, if a special token is spelled out in
        ordinary tokens, or if the prefix was evicted meanwhile.

        Args:
            prefix: As `find` or `learn` returned it.
            text: What comes behind it.
            ids: Of the text.
            generated: What the model added.

        Returns:
            The known prefix.
        """
        if not generated and self._pattern.search(text.encode(), LEAST_BYTES) is None:
            return prefix
        ids = [*ids, *generated]
        whole = self._decode(ids)
        if not whole.startswith(text) or (not generated and len(whole) > len(text)):
            return prefix
        data = whole.encode()
        cuts = [place for place, number in enumerate(ids) if number in self._contents]
        found = [*self._pattern.finditer(data)]
        if [match.group() for match in found] != [self._contents[ids[place]] for place in cuts]:
            return prefix
        ends = [(match.start(), place) for match, place in zip(found, cuts, strict=True)]
        if generated and (not cuts or cuts[-1] + 1 < len(ids)):
            ends.append((len(data), len(ids)))
        keys, new, start, first = list(prefix.keys), list[tuple[bytes, tuple[int, ...]]](), 0, 0
        for end, last in ends:
            if end - start < LEAST_BYTES:
                continue
            keys.append(_key(keys[-1], data[start:end]))
            new.append((keys[-1], tuple(map(self._ints.__getitem__, ids[first:last]))))
            start, first = end, last
        if not self._store(prefix, new):
            return prefix
        return Prefix(tuple(keys), prefix.num_chars + len(data[:start].decode()), prefix.num_tokens + first)

    def _store(self, prefix: Prefix, new: Iterable[tuple[bytes, tuple[int, ...]]]) -> bool:
        with self._lock:
            if len(prefix.keys) > 1 and prefix.keys[-1] not in self._segments:
                return False
            keys = list(prefix.keys)
            for key, segment in new:
                keys.append(key)
                if key not in self._segments:
                    self._segments[key] = segment
                    self.num_bytes += SEGMENT_BYTES + ID_BYTES * len(segment)
            self._touch(keys)
            while self.num_bytes > self._max_bytes:
                _, segment = self._segments.popitem(last=False)
                self.num_bytes -= SEGMENT_BYTES + ID_BYTES * len(segment)
        return True

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in keys[:0:-1]:
            if key in self._segments:
                self._segments.move_to_end(key)


def _key(before: bytes, segment: bytes) -> bytes:
    return blake3(before + segment).digest()


def alternation(words: Sequence[str]) -> str:
    """Return a regular expression for sorted words, none of which begins with another, that tries none twice."""
    if len(words) == 1:
        return re.escape(words[0])
    shared = next(i for i, (first, last) in enumerate(zip(words[0], words[-1], strict=False)) if first != last)
    by_next: dict[str, list[str]] = {}
    for word in words:
        by_next.setdefault(word[shared], []).append(word[shared:])
    return f"{re.escape(words[0][:shared])}(?:{'|'.join(map(alternation, by_next.values()))})"
