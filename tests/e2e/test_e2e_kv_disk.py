"""KV on disk, on the real engine: another process finds it, and gives the tokens that computing it again would."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engines import BASE_ENGINE, EAGER, Engines, Outcome, arrival, conversations

from tests.support.upstream import needs

pytestmark = [pytest.mark.e2e, needs("kv-disk")]

MIB = 1 / 1024
"""In GiB."""
FEW_BLOCKS: Mapping[str, Any] = {"num_gpu_blocks_override": 16, "max_model_len": 448, "max_num_seqs": 4}
FEW_LARGE_BLOCKS: Mapping[str, Any] = {**FEW_BLOCKS, "num_gpu_blocks_override": 9, "block_size": 64}
ROOM: Mapping[str, Any] = {"max_model_len": 448, "enable_prefix_caching": False}
NUM, USER_TOKENS, ANSWER_TOKENS = 3, 100, 40
FIRST = conversations(seed=8, num=NUM, turns=1, user_tokens=USER_TOKENS, answer_tokens=ANSWER_TOKENS)
TURNS = conversations(seed=5)
HISTORY_TOKENS = NUM * ((USER_TOKENS + ANSWER_TOKENS - 1) // 32 * 32)
"""Of all conversations, in whole chunks: what could be found again."""


def tier(folder: Path | None, **options: Any) -> dict[str, Any]:
    disk = {} if folder is None else {"disk_dir": str(folder), "disk_gib": 64 * MIB}
    ours = {**EAGER["vllm_ext"], "kv_tier": {"gib": 64 * MIB, **disk, **options}}
    return {"scheduler_cls": "fcfs", "additional_config": {"vllm_ext": ours}, **FEW_BLOCKS}


def spec(name: str, model: Path, arrivals: list[dict[str, Any]], **engine: Any) -> dict[str, Any]:
    return {"name": name, "engine": {**BASE_ENGINE, "model": str(model), **engine}, "arrivals": arrivals}


def next_turns(first: Outcome) -> list[dict[str, Any]]:
    """The second turn of each conversation, for an engine that has not seen the first."""
    rng = random.Random(9)
    made = []
    for turn in FIRST:
        said = [rng.randrange(32, 127) for _ in range(20)]
        made.append(
            arrival(turn["id"], 0, [*turn["prompt_token_ids"], *first.tokens[turn["id"]], *said], ANSWER_TOKENS)
        )
    return made


@dataclass
class Story:
    """What became of conversations whose engine was started again."""

    first: dict[str, Outcome]
    second: dict[str, Outcome]
    damaged: Outcome
    folder: Path


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, run_engines: Engines, llama: Path) -> Story:
    base = tmp_path_factory.mktemp("disk")

    whole, eight, small = base / "whole", base / "eight", base / "small"
    first = run_engines(
        [
            spec("computed", llama, FIRST, **ROOM),
            spec("whole", llama, FIRST, **tier(whole)),
            spec("eight", llama, FIRST, **tier(eight, bits=8)),
            spec("turns", llama, TURNS, **ROOM),
            spec("turns-small", llama, TURNS, **tier(None, gib=0.4 * MIB)),
            spec("turns-small-disk", llama, TURNS, **tier(small, gib=0.4 * MIB)),
        ]
    )
    turns = next_turns(first["computed"])
    second = run_engines(
        [
            spec("computed", llama, turns, **ROOM),
            spec("whole", llama, turns, **tier(whole)),
            spec("eight", llama, turns, **tier(eight, bits=8)),
            spec("other-format", llama, turns, **{**tier(whole), **FEW_LARGE_BLOCKS}),
        ]
    )
    for path in whole.rglob("*.bin.*"):
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    damaged = run_engines([spec("damaged", llama, turns, **tier(whole))])["damaged"]
    return Story(first, second, damaged, whole)


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert found.tokens == expected.tokens
    assert (found.blocks_missing, found.left_running, found.left_waiting) == (0, 0, 0)


def test_4_a_conversation_goes_on_after_a_restart(story: Story) -> None:
    assert_same(story.first["whole"], story.first["computed"])
    assert story.first["whole"].host_hit_tokens == 0, "nothing was there before"
    assert_same(story.second["whole"], story.second["computed"])
    assert HISTORY_TOKENS * 0.6 <= story.second["whole"].host_hit_tokens <= HISTORY_TOKENS


def test_eight_bits_are_found_after_a_restart(story: Story) -> None:
    """Tokens may differ: the model is random. That they begin alike says that the bytes are the right ones."""
    found = story.second["eight"]
    assert found.host_hit_tokens > HISTORY_TOKENS * 0.6
    same = sum(found.tokens[key][:8] == tokens[:8] for key, tokens in story.second["computed"].tokens.items())
    assert same >= NUM - 1


def test_kv_of_another_format_is_not_found(story: Story) -> None:
    assert_same(story.second["other-format"], story.second["computed"])
    assert story.second["other-format"].host_hit_tokens == 0
    assert len(list(story.folder.glob("*/*/config.json"))) == 2


def test_damaged_kv_is_computed_again_and_reported(story: Story) -> None:
    assert_same(story.damaged, story.second["computed"])
    assert story.damaged.host_hit_tokens == 0
    log = Path(story.damaged.log).read_text(errors="replace")
    assert log.count("a chunk of KV on disk is damaged and set aside") == 1


def test_the_disk_gives_back_what_host_memory_had_no_room_for(story: Story) -> None:
    small, with_disk = story.first["turns-small"], story.first["turns-small-disk"]
    assert_same(with_disk, story.first["turns"])
    assert with_disk.host_hit_tokens > small.host_hit_tokens


def test_only_the_owner_can_read_it(story: Story) -> None:
    assert list(story.folder.rglob("*.bin.*"))
    assert {path.stat().st_mode & 0o77 for path in (story.folder, *story.folder.iterdir())} == {0}


def test_nothing_is_left_in_shared_memory(story: Story) -> None:
    assert story.damaged.tokens
    assert not list(Path("/dev/shm").glob("vllm_offload_*"))
