"""Hints: what is accepted, what is refused and under which name, and what is left alone."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext import hints
from vllm_ext.hints import NO_HINTS, HintError, RequestHints

NOT_AN_SLO = [
    -1,
    0,
    0.0,
    -0.5,
    5e-324,
    math.nan,
    math.inf,
    -math.inf,
    10**400,
    True,
    False,
    "250",
    "",
    [250],
    {"ms": 250},
]
NOT_AN_OSL = [-3, 0, 1_000_001, 1.0, 1.5, math.nan, True, False, "12", [12]]
NOT_A_TAG = ["", "x" * 65, 7, True, ["t"]]
NOT_A_FLAG = [1, 0, 1.0, "true", "", [True]]
NOT_AN_ID = ["", "x" * 257, 7, 1.5, True, ["c"]]


def test_a_request_without_hints_has_none() -> None:
    assert hints.from_extra_args(None) is NO_HINTS
    assert hints.from_extra_args({}) is NO_HINTS
    assert hints.from_extra_args({"kv_transfer_params": {"x": 1}}) is NO_HINTS


def test_all_hints_are_read() -> None:
    extra = {"conversation_id": "c", "ttft_slo_ms": 250, "tbt_slo_ms": 50.5, "jct_slo_ms": 9000, "osl": 12}
    extra["tag"] = "shop"
    assert hints.from_extra_args(extra) == RequestHints(
        conversation_id="c", ttft_slo_ms=250.0, tbt_slo_ms=50.5, jct_slo_ms=9000.0, osl=12, tag="shop"
    )


def test_foreign_keys_are_left_alone_whatever_they_hold() -> None:
    extra = {"ttft_ms": -1, "osl_limit": "x", "osl": 3}
    assert hints.from_extra_args(extra) == RequestHints(osl=3)
    assert extra == {"ttft_ms": -1, "osl_limit": "x", "osl": 3}


@pytest.mark.parametrize("hidden", ["bench_output_len", "bench_anything"])
def test_invariant_1_hidden_benchmark_keys_never_become_hints(hidden: str) -> None:
    assert hints.from_extra_args({hidden: 17}) is NO_HINTS


def test_a_null_counts_as_not_said() -> None:
    assert hints.from_extra_args(dict.fromkeys(hints.KEYS)) == NO_HINTS


def test_the_session_id_names_the_conversation_unless_the_client_says_otherwise() -> None:
    assert hints.from_extra_args(None, session_id="s").conversation_id == "s"
    assert hints.from_extra_args({"conversation_id": "c"}, session_id="s").conversation_id == "c"


def test_an_unused_session_id_is_not_judged() -> None:
    assert hints.from_extra_args({"conversation_id": "c"}, session_id="s" * 1000).conversation_id == "c"


@pytest.mark.parametrize("value", NOT_AN_SLO, ids=lambda v: repr(v)[:20])
@pytest.mark.parametrize("key", hints.SLO_KEYS)
def test_a_malformed_objective_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(HintError, match=f"^{key}=") as caught:
        hints.from_extra_args({key: value})
    assert caught.value.field == key


@pytest.mark.parametrize("value", NOT_AN_OSL, ids=repr)
def test_a_malformed_length_is_refused_by_name(value: Any) -> None:
    with pytest.raises(HintError, match=r"^osl=.*from 1 to 1000000"):
        hints.from_extra_args({"osl": value})


@pytest.mark.parametrize("value", NOT_A_TAG, ids=lambda v: repr(v)[:20])
def test_a_malformed_tag_is_refused_by_name(value: Any) -> None:
    with pytest.raises(HintError, match="must be a string of 1 to 64 characters") as caught:
        hints.from_extra_args({"tag": value})
    assert (caught.value.field, caught.value.value) == ("tag", value)


@pytest.mark.parametrize("value", NOT_A_FLAG, ids=repr)
def test_a_flag_is_a_boolean(value: Any) -> None:
    with pytest.raises(HintError, match=r"^slo_report=.*: must be true or false;"):
        hints.from_extra_args({"slo_report": value})


@pytest.mark.parametrize("value", [True, False])
def test_a_report_may_be_asked_for_or_declined(value: bool) -> None:
    assert hints.from_extra_args({"slo_report": value}).slo_report is value


@pytest.mark.parametrize("value", [0, -1, True, "60", math.inf, math.nan, 30 * 86400 + 1, [60]], ids=repr)
def test_a_malformed_time_to_live_is_refused_by_name(value: Any) -> None:
    with pytest.raises(HintError, match=r"^kv_ttl_s=.*: must be a number of seconds greater than 0"):
        hints.from_extra_args({"kv_ttl_s": value})


def test_a_time_to_live_is_seconds() -> None:
    assert hints.from_extra_args({"kv_ttl_s": 60}).kv_ttl_s == 60.0
    assert hints.from_extra_args({}).kv_ttl_s is None


SHORTENED = [(60.0, "salt", 0.0), (60.0, "salt", 60.0), (None, None, 60.0)]


@pytest.mark.parametrize(("ttl_s", "salt", "server_ttl_s"), SHORTENED)
def test_who_has_a_salt_shortens_a_life(ttl_s: float | None, salt: str | None, server_ttl_s: float) -> None:
    hints.check_lifetime(RequestHints(kv_ttl_s=ttl_s), salt, server_ttl_s)


@pytest.mark.parametrize(
    ("salt", "server_ttl_s", "allowed"),
    [
        (None, 0.0, "sent with a cache_salt"),
        ("", 100.0, "sent with a cache_salt"),
        ("salt", 59.9, "at most 59.9, the server's own"),
    ],
)
def test_a_life_that_its_client_may_not_set_is_refused(salt: str | None, server_ttl_s: float, allowed: str) -> None:
    with pytest.raises(HintError, match=rf"^kv_ttl_s=60\.0: must be {allowed}"):
        hints.check_lifetime(RequestHints(kv_ttl_s=60.0), salt, server_ttl_s)


@pytest.mark.parametrize("key", ["conversation_id", "tag"])
def test_a_text_that_no_file_could_hold_is_refused(key: str) -> None:
    """JSON carries half a surrogate pair; the first log or metric that encodes it would fail."""
    with pytest.raises(HintError, match=f"^{key}="):
        hints.from_extra_args({key: "a\ud800"})


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("value", [10**5000, Unspeakable()], ids=["a number of 5001 digits", "an object"])
@pytest.mark.parametrize("key", hints.KEYS)
def test_what_can_not_be_shown_is_refused_all_the_same(key: str, value: Any) -> None:
    """Python shows no integer of more than 4300 digits: the refusal itself failed, and with it the engine."""
    with pytest.raises(HintError, match=rf"^{key}=<(int|Unspeakable)>: must be"):
        hints.from_extra_args({key: value})


@pytest.mark.parametrize("value", NOT_AN_ID, ids=lambda v: repr(v)[:20])
def test_a_malformed_conversation_is_refused_by_name(value: Any) -> None:
    with pytest.raises(HintError, match=r"^conversation_id=.*1 to 256 characters"):
        hints.from_extra_args({"conversation_id": value})


def test_a_session_id_that_is_too_long_is_refused_under_its_own_name() -> None:
    with pytest.raises(HintError, match=r"^session_id="):
        hints.from_extra_args({"osl": 3}, session_id="s" * 257)


@pytest.mark.parametrize("length", [1, 256])
def test_the_longest_and_the_shortest_conversation_id_are_accepted(length: int) -> None:
    assert hints.from_extra_args({"conversation_id": "c" * length}).conversation_id == "c" * length


@pytest.mark.parametrize("osl", [1, 1_000_000])
def test_the_longest_and_the_shortest_length_are_accepted(osl: int) -> None:
    assert hints.from_extra_args({"osl": osl}).osl == osl


def test_a_refusal_does_not_repeat_a_huge_value() -> None:
    with pytest.raises(HintError) as caught:
        hints.from_extra_args({"conversation_id": "x" * 100_000})
    assert len(str(caught.value)) < 300


def test_a_refusal_survives_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(HintError("osl", 0, "a number")))  # noqa: S301 - our own bytes
    assert (error.field, error.value, error.allowed) == ("osl", 0, "a number")


def test_headers_are_read_in_any_case() -> None:
    headers = {"X-LLM-D-SLO-TTFT-MS": "250.5", "x-dynamo-OSL": "12", "Accept": "*/*", "X-Session-ID": "s"}
    assert hints.from_headers(headers) == {"ttft_slo_ms": 250.5, "osl": 12}


def test_headers_of_others_are_left_alone() -> None:
    assert hints.from_headers({"x-dynamo-isl": "nonsense", "x-llm-d-slo-tpot-ms": "-1"}) == {}


@pytest.mark.parametrize("text", ["", "abc", "-1", "0", "nan", "inf", "1e999"])
def test_a_malformed_objective_header_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(HintError, match=r"^x-llm-d-slo-ttft-ms="):
        hints.from_headers({"x-llm-d-slo-ttft-ms": text})


@pytest.mark.parametrize("text", ["", "abc", "-1", "0", "1.5", "1e3", "1000001"])
def test_a_malformed_length_header_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(HintError, match=r"^x-dynamo-osl="):
        hints.from_headers({"x-dynamo-osl": text})


@pytest.mark.parametrize(
    "nvext", [None, {}, {"agent_hints": None}, {"agent_hints": {}}, {"annotations": ["x"]}], ids=repr
)
def test_a_body_extension_without_our_hint_says_nothing(nvext: Any) -> None:
    assert hints.from_body_extension(nvext) == {}


def test_the_body_extension_carries_the_length() -> None:
    assert hints.from_body_extension({"agent_hints": {"osl": 123, "priority": 1}}) == {"osl": 123}


@pytest.mark.parametrize(
    ("nvext", "field"),
    [
        ("x", "nvext"),
        ([1], "nvext"),
        ({"agent_hints": 3}, "nvext.agent_hints"),
        ({"agent_hints": {"osl": 0}}, "nvext.agent_hints.osl"),
        ({"agent_hints": {"osl": True}}, "nvext.agent_hints.osl"),
    ],
)
def test_a_malformed_body_extension_is_refused_by_its_path(nvext: Any, field: str) -> None:
    with pytest.raises(HintError) as caught:
        hints.from_body_extension(nvext)
    assert caught.value.field == field


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def attempt(read: Callable[[Any], Any], source: Any) -> tuple[Any, str]:
    """Return what was read, or None and the field that was refused."""
    try:
        return read(source), ""
    except HintError as error:
        return None, error.field


@given(st.dictionaries(st.sampled_from([*hints.KEYS, "other"]), json_values))
def test_any_body_gives_sane_hints_or_names_one_of_our_fields(extra: dict[str, Any]) -> None:
    found, refused = attempt(hints.from_extra_args, extra)
    if found is None:
        assert refused in hints.KEYS
        return
    for key in hints.SLO_KEYS:
        value = getattr(found, key)
        assert value is None or (isinstance(value, float) and math.isfinite(value) and value > 0)
    assert found.osl is None or 1 <= found.osl <= hints.MAX_OSL
    assert found.conversation_id is None or 1 <= len(found.conversation_id) <= hints.MAX_CONVERSATION_ID_CHARS


@given(st.dictionaries(st.sampled_from([hints.SLO_HEADER, hints.OSL_HEADER, "accept"]), st.text(max_size=20)))
def test_what_headers_give_is_accepted_in_a_body(headers: dict[str, str]) -> None:
    found, refused = attempt(hints.from_headers, headers)
    if found is None:
        assert refused in headers
    else:
        hints.from_extra_args(found)


@given(json_values)
def test_what_a_body_extension_gives_is_accepted_in_a_body(nvext: Any) -> None:
    found, refused = attempt(hints.from_body_extension, nvext)
    if found is None:
        assert refused.startswith("nvext")
    else:
        hints.from_extra_args(found)
