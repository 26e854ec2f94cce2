"""What a client may say of a request: latency objectives, conversation, expected output length; and ask: a report.

Hints travel in the request body (``vllm_xargs``), in headers, or in Dynamo's ``nvext`` body extension. All three end in
vLLM's ``SamplingParams.extra_args``; keys not listed in `KEYS` belong to others and are left alone. A hint is a wish,
never the true output length. Nothing here imports vLLM.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

MAX_CONVERSATION_ID_CHARS = 256
"""Longest conversation id; the scheduler keeps ids in memory, so a client must not choose their size."""

MAX_TAG_CHARS = 64
"""Longest tag, for the same reason."""

MAX_OSL = 1_000_000
"""Largest expected output length, in tokens."""

MAX_TTL_S = 30 * 86400.0
"""Longest time a client may want a conversation's KV kept, in seconds."""

SLO_KEYS = ("ttft_slo_ms", "tbt_slo_ms", "jct_slo_ms")
REPORT_KEY = "slo_report"
CLIENT_KEY = "client_key"
"""Hash of the API key, which the front end adds where it tells clients apart; nobody may send it."""
KEYS = ("conversation_id", *SLO_KEYS, "osl", "tag", "kv_ttl_s", REPORT_KEY, CLIENT_KEY)
"""The keys of ``extra_args`` that are ours."""

PRIORITY_HEADER = "x-vllm-priority"
"""vLLM's own, which it ignores where it is no number."""
SLO_HEADER = "x-llm-d-slo-ttft-ms"
OSL_HEADER = "x-dynamo-osl"

_SLO_ALLOWED = "a finite number of milliseconds greater than 0"
_OSL_ALLOWED = f"a whole number of tokens from 1 to {MAX_OSL}"
_TAG_ALLOWED = f"a string of 1 to {MAX_TAG_CHARS} characters"
_FLAG_ALLOWED = "true or false"
_TTL_ALLOWED = f"a number of seconds greater than 0 and at most {MAX_TTL_S:.0f}"
_ID_ALLOWED = f"a string of 1 to {MAX_CONVERSATION_ID_CHARS} characters"
_SHOWN_CHARS = 80
_CLOSE = 0.8
"""Likeness from which a key is taken for a misspelt one."""


class HintError(ValueError):
    """A hint is malformed.

    Attributes:
        field: Name of the hint as the client wrote it, such as ``ttft_slo_ms`` or ``x-dynamo-osl``.
        value: What the client sent.
        allowed: What would have been accepted, as a noun phrase.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}={_shown(value)}: must be {allowed}; correct it or leave it out")
        self.field = field
        self.value = value
        self.allowed = allowed

    def __reduce__(self) -> tuple[type[HintError], tuple[str, object, str]]:
        return type(self), (self.field, self.value, self.allowed)


@dataclass(frozen=True, kw_only=True)
class RequestHints:
    """The validated hints of one request; ``None`` means that the client said nothing."""

    conversation_id: str | None = None
    """Requests of one conversation share it; never used to decide whether KV may be reused."""

    ttft_slo_ms: float | None = None
    """Wished time to first token, in milliseconds after arrival."""

    tbt_slo_ms: float | None = None
    """Wished time between tokens, in milliseconds."""

    jct_slo_ms: float | None = None
    """Wished job completion time, in milliseconds after arrival."""

    osl: int | None = None
    """Output length the client expects, in tokens."""

    tag: str | None = None
    """Name of the application or tenant; requests of one tag are expected to be alike."""

    kv_ttl_s: float | None = None
    """How long after its last use the conversation's KV may stay in the tier, in seconds; see `check_lifetime`."""

    client_key: str | None = None
    """What tells clients apart by their API keys, added by the front end."""

    slo_report: bool = False
    """Whether the response's usage is to say how long the request took and whether its objectives were met."""


NO_HINTS = RequestHints()


def from_extra_args(extra: Mapping[str, Any] | None, session_id: str | None = None) -> RequestHints:
    """Return the hints found in a request's ``extra_args``.

    Args:
        extra: ``SamplingParams.extra_args``; foreign keys are ignored.
        session_id: vLLM's own session id, used as conversation where ``conversation_id`` is absent.

    Raises:
        HintError: One of our keys, or the session id, has a value that is not allowed.
    """
    found = {key: extra[key] for key in KEYS if key in extra} if extra else {}
    if not found and session_id is None:
        return NO_HINTS
    conversation_id = check_conversation_id("conversation_id", found.get("conversation_id"))
    if conversation_id is None:
        conversation_id = check_conversation_id("session_id", session_id)
    return RequestHints(
        conversation_id=conversation_id,
        ttft_slo_ms=check_slo_ms("ttft_slo_ms", found.get("ttft_slo_ms")),
        tbt_slo_ms=check_slo_ms("tbt_slo_ms", found.get("tbt_slo_ms")),
        jct_slo_ms=check_slo_ms("jct_slo_ms", found.get("jct_slo_ms")),
        osl=check_osl("osl", found.get("osl")),
        tag=check_tag("tag", found.get("tag")),
        kv_ttl_s=check_ttl_s("kv_ttl_s", found.get("kv_ttl_s")),
        client_key=check_tag(CLIENT_KEY, found.get(CLIENT_KEY)),
        slo_report=check_flag(REPORT_KEY, found.get(REPORT_KEY)),
    )


def from_headers(headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the hints carried by headers, keyed as in ``extra_args``; header names match in any case.

    Raises:
        HintError: A header of ours is malformed; ``field`` is the header's name.
    """
    hints: dict[str, Any] = {}
    for name, text in headers.items():
        lowered = name.lower()
        if lowered == SLO_HEADER:
            hints["ttft_slo_ms"] = _header_slo_ms(text)
        elif lowered == OSL_HEADER:
            hints["osl"] = _header_osl(text)
        elif lowered == PRIORITY_HEADER:
            _check_priority(text)
    return hints


def from_body_extension(nvext: Any) -> dict[str, Any]:
    """Return the hints in Dynamo's body extension ``{"agent_hints": {"osl": 123}}``; its other keys are not ours.

    Raises:
        HintError: The extension or a hint in it is malformed; ``field`` is the path, such as ``nvext.agent_hints.osl``.
    """
    if nvext is None:
        return {}
    if not isinstance(nvext, Mapping):
        raise HintError("nvext", nvext, "an object")
    agent_hints = nvext.get("agent_hints")
    if agent_hints is None:
        return {}
    if not isinstance(agent_hints, Mapping):
        raise HintError("nvext.agent_hints", agent_hints, "an object")
    osl = check_osl("nvext.agent_hints.osl", agent_hints.get("osl"))
    return {} if osl is None else {"osl": osl}


def misspelt(given: Iterable[str]) -> dict[str, str]:
    """Return the keys that are near to a hint's name but none, with that name; whatever else is there is not ours."""
    found = {}
    for key in set(given) - set(KEYS):
        close = difflib.get_close_matches(key.lower().replace("-", "_"), KEYS, n=1, cutoff=_CLOSE)
        if close:
            found[key] = close[0]
    return found


def check_slo_ms(field: str, value: Any) -> float | None:
    """Return a latency objective in milliseconds, or raise `HintError` naming ``field``."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise HintError(field, value, _SLO_ALLOWED)
    try:
        number = float(value)
    except OverflowError as error:
        raise HintError(field, value, _SLO_ALLOWED) from error
    return _positive_ms(field, value, number)


def _positive_ms(field: str, value: Any, number: float) -> float:
    """Return a number of milliseconds that is positive in seconds, too: 5e-324 ms are 0 s."""
    if not math.isfinite(number) or number / 1000 <= 0:
        raise HintError(field, value, _SLO_ALLOWED)
    return number


def check_osl(field: str, value: Any) -> int | None:
    """Return an expected output length in tokens, or raise `HintError` naming ``field``."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_OSL:
        raise HintError(field, value, _OSL_ALLOWED)
    return value


def check_tag(field: str, value: Any) -> str | None:
    """Return a tag, or raise `HintError` naming ``field``."""
    return None if value is None else _text(field, value, MAX_TAG_CHARS, _TAG_ALLOWED)


def check_flag(field: str, value: Any) -> bool:
    """Return a flag, False where nothing was said, or raise `HintError` naming ``field``."""
    if value is None:
        return False
    if not isinstance(value, bool):
        raise HintError(field, value, _FLAG_ALLOWED)
    return value


def check_ttl_s(field: str, value: Any) -> float | None:
    """Return a time to live in seconds, or raise `HintError` naming ``field``."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_TTL_S:
        raise HintError(field, value, _TTL_ALLOWED)
    return float(value)


def check_lifetime(hints: RequestHints, cache_salt: str | None, server_ttl_s: float) -> None:
    """Check whether a client may give its conversation this life: it may only shorten it, and only its own.

    Args:
        cache_salt: Of the request. Names of conversations are no secrets: without a salt anybody could end one.
        server_ttl_s: ``kv_tier.ttl_s``, in seconds; 0: the server ends none.

    Raises:
        HintError: ``kv_ttl_s`` was sent without a salt, or is longer than the server's.
    """
    if hints.kv_ttl_s is None:
        return
    if not cache_salt:
        raise HintError("kv_ttl_s", hints.kv_ttl_s, "sent with a cache_salt, which says whose conversation it is")
    if 0 < server_ttl_s < hints.kv_ttl_s:
        allowed = f"at most {server_ttl_s:g}, the server's own: a client can only shorten the life of a conversation"
        raise HintError("kv_ttl_s", hints.kv_ttl_s, allowed)


def salt_tag(salt: str | None, key: bytes) -> str:
    """Return what stands for a ``cache_salt``: a keyed hash, 32 hex digits, which means nothing elsewhere; "" for none.

    Salts are secrets of tenants, and as long as their clients like: none is kept.
    """
    if not salt:
        return ""
    return blake2b(salt.encode(errors="surrogatepass"), key=key, digest_size=16).hexdigest()


def check_conversation_id(field: str, value: Any) -> str | None:
    """Return a conversation id, or raise `HintError` naming ``field``."""
    return None if value is None else _text(field, value, MAX_CONVERSATION_ID_CHARS, _ID_ALLOWED)


def _text(field: str, value: Any, most_chars: int, allowed: str) -> str:
    """Return a text that can be written: half a surrogate pair, which JSON can carry, would fail in the first file."""
    if not isinstance(value, str) or not 1 <= len(value) <= most_chars:
        raise HintError(field, value, allowed)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise HintError(field, value, allowed) from error
    return value


def _shown(value: object) -> str:
    """Return a value as an error shows it. What can't be shown at all, such as 10**5000, is named by its type."""
    try:
        shown = repr(value)
    except Exception:  # noqa: BLE001 - an offline value may be anything, and what is wrong is said all the same
        return f"<{type(value).__name__}>"
    return shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}... ({len(shown)} characters)"


def _header_slo_ms(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError as error:
        raise HintError(SLO_HEADER, text, _SLO_ALLOWED) from error
    return _positive_ms(SLO_HEADER, text, number)


def _check_priority(text: str) -> None:
    try:
        int(text)
    except ValueError as error:
        raise HintError(PRIORITY_HEADER, text, "a whole number") from error


def _header_osl(text: str) -> int | None:
    try:
        number = int(text)
    except ValueError as error:
        raise HintError(OSL_HEADER, text, _OSL_ALLOWED) from error
    if not 1 <= number <= MAX_OSL:
        raise HintError(OSL_HEADER, text, _OSL_ALLOWED)
    return number
