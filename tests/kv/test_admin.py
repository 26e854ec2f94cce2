"""One engine's answers to an administrator, on the real books of a tier, and the option that asks for them."""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import Any

import pytest

from tests.support.tier_rig import BLOCK_SIZE, quiet
from vllm_ext.config import ConfigError, parse
from vllm_ext.config.flags import merge_flags
from vllm_ext.kv.conversations.admin import MOST_SHOWN
from vllm_ext.kv.conversations.conversation import ConversationBook
from vllm_ext.launch.features import needed_groups

TENANT, OTHER = "salt-of-a-tenant", "salt-of-another"


class Engine:
    """An engine whose conversations took a turn of three chunks each, a second apart; the last one holds four."""

    def __init__(self, **setup: Any) -> None:
        self.rig = quiet(**{"host_chunks": 40, "num_blocks": 60, **setup})
        for number, (name, salt) in enumerate([("a", None), ("b", TENANT), ("b", OTHER), ("c", None)]):
            first = 100 * (number + 1)
            chunks = 3 + (name == "c")
            self.rig.add(range(first, first + chunks * BLOCK_SIZE), 2, session=name, salt=salt)
            self.rig.settle()
            self.rig.clock.advance(1.0)

    def __call__(self, action: str, **arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.rig.scheduler.tier_admin.answer(action, arguments)
        text = json.dumps(answer)
        assert json.loads(text) == answer
        assert TENANT not in text
        assert OTHER not in text
        return answer

    def names(self, cursor: int = 0, limit: int = 10) -> tuple[list[str], int, bool]:
        listed = self("list", cursor=cursor, limit=limit)
        assert listed["total"] == 4
        return [row["name"] for row in listed["conversations"]], listed["cursor"], listed["more"]


def test_conversations_are_listed_page_by_page() -> None:
    engine = Engine()
    names, cursor, more = engine.names(limit=4)
    assert (names, more) == (["a", "b", "b", "c"], False)
    assert engine.names(cursor) == ([], cursor, False)
    names, cursor, more = engine.names(limit=3)
    assert (names, more) == (["a", "b", "b"], True)
    assert engine.names(cursor)[0] == ["c"]


def test_a_page_reads_no_more_than_it_shows() -> None:
    """Of 60,000 conversations one page took 423 ms, in which the engine stood still."""
    book = ConversationBook()
    for other in range(5_000):
        book.leave(book.enter(f"c{other}", "", [], 0.0), [], 0.0)
    read: list[int] = []

    class Counted(dict[int, Any]):
        def __getitem__(self, key: int) -> Any:
            read.append(key)
            return super().__getitem__(key)

        __iter__ = keys = values = items = None  # type: ignore[assignment]

    book._known = Counted(book._known)
    for number in (1, 2_000, 4_900):
        read.clear()
        page = list(islice(book.after(number), 50))
        assert [row.number for row in page] == read == sorted(read)
        assert (len(read), read[0]) == (50, min(row for row in book._ascending if row > number))


def test_of_a_name_with_many_salts_a_bounded_number_is_shown() -> None:
    engine = Engine()
    book = engine.rig.side.keeper.book
    for number in range(MOST_SHOWN + 5):
        book.leave(book.enter("many", f"tag-{number}", [], 0.0), [], 0.0)
    shown = engine("show", name="many")
    assert (shown["total"], len(shown["conversations"])) == (MOST_SHOWN + 5, MOST_SHOWN)


def test_a_conversation_is_shown_as_it_is() -> None:
    engine = Engine()
    (row,) = engine("show", name="c")["conversations"]
    assert 1.0 <= row.pop("unused_s") < 10.0
    assert re.fullmatch(r"[0-9a-f]{8}-\d+", row.pop("id"))
    chunk_bytes = engine("statistics")["chunk_bytes"]
    assert row == {
        "name": "c",
        "salt_tag": None,
        "turns": 1,
        "running": 0,
        "ttl_s": None,
        "chunks": 4,
        "bytes": 4 * chunk_bytes,
    }
    assert engine("show", name="nobody") == {"total": 0, "conversations": []}


def test_salts_are_told_apart_and_not_shown() -> None:
    engine, other = Engine(), Engine()
    rows = engine("show", name="b")["conversations"]
    tags = [row["salt_tag"] for row in rows]
    assert len({*tags, None}) == 3
    assert engine("drop", name="b") == {"conversation": None, "with_other_salts": 2}
    for unknown in (rows[0]["id"], "-1", "1", rows[0]["id"].replace("-", "-x")):  # all engines are asked
        assert other("drop", id=unknown) == {"conversation": None, "with_other_salts": 0}
    assert engine("drop", id=rows[0]["id"].replace("-", "-x"))["conversation"] is None
    done = engine("drop", id=rows[0]["id"])
    assert (done["dropped_chunks"], done["conversation"]["salt_tag"]) == (3, tags[0])
    assert [row["chunks"] for row in engine("show", name="b")["conversations"]] == [0, 3]
    assert engine("drop", name="b", salt=OTHER)["dropped_chunks"] == 3
    assert other("show", name="b")["conversations"][0]["salt_tag"] not in tags, "tags mean nothing elsewhere"


def test_an_anonymous_conversation_has_no_name() -> None:
    engine = Engine()
    engine.rig.add(range(700, 700 + 2 * BLOCK_SIZE), 2)
    engine.rig.settle()
    row = engine("list", cursor=0, limit=10)["conversations"][-1]
    assert row["name"] is None
    for name in ("unnamed-1", "None", ""):
        assert engine("drop", name=name)["conversation"] is None
    assert engine("drop", id=row["id"])["dropped_chunks"] == 2


def test_a_dropped_conversation_is_not_found_again() -> None:
    engine = Engine(prefix_caching=False)
    assert engine("drop", name="a")["left_chunks"] == 0
    before = engine("statistics")
    for first, session in ((100, "a"), (400, "c")):
        engine.rig.add(range(first, first + 3 * BLOCK_SIZE + 1), 2, session=session)
        engine.rig.settle()
    after = engine("statistics")
    assert after["loaded_chunks"] - before["loaded_chunks"] == 3, "those of c"
    assert after["gone_chunks"]["dropped"] == 3
    assert after["conversations"]["dropped"] == 1


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_under_vllms_own_policies_nobody_knows_whose_chunks_are_whose(policy: str) -> None:
    engine = Engine(policy=policy)
    (row,) = engine("show", name="a")["conversations"]
    assert (row["turns"], row["chunks"], row["bytes"]) == (1, None, None)
    assert engine("drop", name="a")["dropped_chunks"] == 0


def test_an_unknown_action_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"action='burn': must be one of statistics, list"):
        Engine()("burn")


ADMIN = {"kv_tier": {"gib": 1.0, "admin": True}}


@pytest.mark.parametrize(
    ("options", "usage", "wanted"),
    [
        (ADMIN, "OPENAI_API_SERVER", True),
        (ADMIN, "API_SERVER", True),
        (ADMIN, "OPENAI_BATCH_RUNNER", False),
        (ADMIN, "LLM_CLASS", False),
        ({"admin": True}, "OPENAI_API_SERVER", True),
        ({"kv_tier": {"gib": 1.0}}, "OPENAI_API_SERVER", False),
        ({}, "OPENAI_API_SERVER", False),
    ],
)
def test_routes_are_added_to_servers_that_ask_for_them(options: dict[str, Any], usage: str, wanted: bool) -> None:
    assert ("admin" in needed_groups(parse(options), usage)) is wanted


def test_the_flag_sets_the_option_and_what_makes_no_sense_is_refused() -> None:
    assert parse(merge_flags({}, {"kv_tier_gib": 1.0, "kv_tier_admin": True})).kv_tier.admin
    assert not parse(merge_flags(ADMIN, {"kv_tier_admin": False})).kv_tier.admin
    with pytest.raises(ConfigError, match=r"kv_tier\.admin=True: needs kv_tier\.gib"):
        parse({"kv_tier": {"admin": True}})
    with pytest.raises(ConfigError, match=r"kv_tier\.admin='yes'"):
        parse({"kv_tier": {"gib": 1.0, "admin": "yes"}})
