"""One engine's answers to an administrator, on the real books of a tier."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_ext.kv.admin import SORTS

from .tier_stateful_rig import BLOCK_SIZE, Setup, TierRig

TENANT, OTHER = "salt-of-a-tenant", "salt-of-another"


class Engine:
    """An engine whose conversations took a turn of three chunks each, a second apart; the last one holds four."""

    def __init__(self, **setup: Any) -> None:
        self.rig = TierRig(Setup(**{"host_chunks": 40, "num_blocks": 60, "slow": 0.0, **setup}))
        for number, (name, salt) in enumerate([("a", None), ("b", TENANT), ("b", OTHER), ("c", None)]):
            first = 100 * (number + 1)
            chunks = 3 + (name == "c")
            self.rig.add(range(first, first + chunks * BLOCK_SIZE), 2, session=name, salt=salt)
            while self.rig.loop.has_work:
                self.rig.step()
            self.rig.clock.advance(1.0)

    def __call__(self, action: str, **arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.rig.scheduler.tier_admin.answer(action, arguments)
        text = json.dumps(answer)
        assert json.loads(text) == answer
        assert TENANT not in text
        assert OTHER not in text
        return answer

    def change(self, action: str, name: str, salt: str | None = None, salt_tag: str | None = None) -> dict[str, Any]:
        return self(action, name=name, salt=salt, salt_tag=salt_tag)

    def names(self, **arguments: Any) -> list[str]:
        listed = self("list", **{"offset": 0, "limit": 10, "sort": "last_used", **arguments})
        assert listed["total"] == 4
        return [row["name"] for row in listed["conversations"]]


def test_conversations_are_listed_in_the_order_asked_for() -> None:
    engine = Engine()
    assert engine.names() == ["c", "b", "b", "a"]
    assert engine.names(sort="name") == ["a", "b", "b", "c"]
    assert engine.names(sort="chunks")[0] == "c"
    assert engine.names(offset=1, limit=2) == ["b", "b"]
    assert engine.names(offset=4, limit=2) == []
    assert all(len(engine.names(sort=sort)) == 4 for sort in SORTS)


def test_a_conversation_is_shown_as_it_is() -> None:
    engine = Engine()
    (row,) = engine("show", name="c")["conversations"]
    assert 1.0 <= row.pop("unused_s") < 10.0
    chunk_bytes = engine("statistics")["chunk_bytes"]
    assert row == {
        "name": "c",
        "named_by_client": True,
        "salt_tag": None,
        "turns": 1,
        "running": 0,
        "pinned": False,
        "ttl_s": None,
        "chunks": 4,
        "bytes": 4 * chunk_bytes,
    }
    assert engine("show", name="nobody") == {"conversations": []}


def test_salts_are_told_apart_and_not_shown() -> None:
    engine = Engine()
    tags = [row["salt_tag"] for row in engine("show", name="b")["conversations"]]
    assert len(set(tags)) == 2
    assert None not in tags
    assert engine.change("drop", "b") == {"conversation": None, "with_other_salts": 2}
    assert engine.change("drop", "b", salt_tag="0" * 12) == {"conversation": None, "with_other_salts": 2}
    done = engine.change("drop", "b", salt_tag=tags[0])
    assert (done["dropped_chunks"], done["conversation"]["salt_tag"]) == (3, tags[0])
    assert [row["chunks"] for row in engine("show", name="b")["conversations"]] == [0, 3]
    assert engine.change("drop", "b", salt=OTHER)["dropped_chunks"] == 3
    assert Engine()("show", name="b")["conversations"][0]["salt_tag"] not in tags, "tags mean nothing elsewhere"


def test_a_dropped_conversation_is_not_found_again() -> None:
    engine = Engine(prefix_caching=False)
    assert engine.change("drop", "a")["left_chunks"] == 0
    before = engine("statistics")
    for first, session in ((100, "a"), (400, "c")):
        engine.rig.add(range(first, first + 3 * BLOCK_SIZE + 1), 2, session=session)
        while engine.rig.loop.has_work:
            engine.rig.step()
    after = engine("statistics")
    assert after["loaded_chunks"] - before["loaded_chunks"] == 3, "those of c"
    assert after["gone_chunks"]["dropped"] == 3
    assert after["conversations"]["dropped"] == 1


def test_a_conversation_is_pinned_and_let_go() -> None:
    engine = Engine()
    assert engine.change("pin", "a")["conversation"]["pinned"]
    assert engine("statistics")["host"]["pinned_chunks"] == 3
    assert not engine.change("unpin", "a")["conversation"]["pinned"]
    assert engine("statistics")["host"]["pinned_chunks"] == 0


def test_what_pins_may_hold_is_said_where_it_is_too_much() -> None:
    engine = Engine(host_chunks=14)  # a quarter of which is three
    answer = engine.change("pin", "c")
    assert not answer["conversation"]["pinned"]
    assert "may hold 3 chunks together (kv_tier.pin_share), and this one holds 4" in answer["refused"]
    assert "refused" not in engine.change("pin", "a")


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_under_vllms_own_policies_nobody_knows_whose_chunks_are_whose(policy: str) -> None:
    engine = Engine(policy=policy)
    (row,) = engine("show", name="a")["conversations"]
    assert (row["turns"], row["chunks"], row["bytes"]) == (1, None, None)
    assert "kv_tier.policy" in engine.change("pin", "a")["refused"]
    assert engine.change("drop", "a")["dropped_chunks"] == 0


def test_an_unknown_action_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"action='burn': must be one of statistics, list"):
        Engine()("burn")
