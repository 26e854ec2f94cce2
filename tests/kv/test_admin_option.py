"""The admin endpoint is there only if it is asked for, where there is a tier, and in servers."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_ext.config import ConfigError, parse
from vllm_ext.config.flags import merge_flags
from vllm_ext.launch.features import needed_groups

ADMIN = {"kv_tier": {"gib": 1.0, "admin": True}}


@pytest.mark.parametrize(
    ("options", "usage", "wanted"),
    [
        (ADMIN, "OPENAI_API_SERVER", True),
        (ADMIN, "API_SERVER", True),
        (ADMIN, "OPENAI_BATCH_RUNNER", False),
        (ADMIN, "LLM_CLASS", False),
        ({"kv_tier": {"gib": 1.0}}, "OPENAI_API_SERVER", False),
        ({}, "OPENAI_API_SERVER", False),
    ],
)
def test_routes_are_added_to_servers_that_ask_for_them(options: dict[str, Any], usage: str, wanted: bool) -> None:
    assert ("kv-admin" in needed_groups(parse(options), usage)) is wanted


def test_the_flag_sets_the_option() -> None:
    merged = merge_flags({}, {"kv_tier_gib": 1.0, "kv_tier_admin": True})
    assert parse(merged).kv_tier.admin
    assert not parse(merge_flags(ADMIN, {"kv_tier_admin": False})).kv_tier.admin


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ({"admin": True}, r"kv_tier\.admin=True: needs kv_tier\.gib"),
        ({"gib": 1.0, "admin": "yes"}, r"kv_tier\.admin='yes'"),
    ],
)
def test_what_makes_no_sense_is_refused(tier: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse({"kv_tier": tier})
