"""Where lengths come from: presets, files, mixtures; and how they are changed."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from vllm_ext.datasets import DatasetError
from vllm_ext.simulation.workloads import sources, synthetic
from vllm_ext.simulation.workloads.build import build
from vllm_ext.simulation.workloads.requests import SimRequest
from vllm_ext.simulation.workloads.spec import WorkloadSpec

from .parts import counts, jsonl, lengths, requests, workload


def mooncake(folder: Path) -> str:
    fields = ("timestamp", "input_length", "hash_ids")
    entries = [(0, 1200, [0, 1, 2]), (500, 1536, [0, 1, 3]), (2500, 100, [9])]
    return jsonl(folder, *(dict(zip(fields, entry, strict=True)) | {"output_length": 5} for entry in entries))


def common(one: SimRequest, other: SimRequest) -> int:
    pairs = zip(one.token_ids or (), other.token_ids or (), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(one.prompt_tokens, other.prompt_tokens))


@pytest.mark.parametrize("preset", [*synthetic.PRESETS, *synthetic.CONVERSATIONS])
def test_every_preset_can_be_served(preset: str) -> None:
    load = workload(source=preset, num_requests=50)
    assert (load.name, load.rows, len(load.sha256)) == (preset, 0, 64)
    assert all(r.prompt_tokens >= 1 and r.output_tokens >= 1 for r in load.start())


def test_file_is_served_in_order_with_its_name_rows_and_checksum_and_a_preset_with_one_of_its_seed(
    tmp_path: Path,
) -> None:
    source = counts(tmp_path, (1, 2), (3, 4))
    load = workload(source=source)
    assert [(r.prompt_tokens, r.output_tokens, r.token_ids) for r in load.start()] == [(1, 2, None), (3, 4, None)]
    assert (load.name, load.rows) == ("rows.jsonl", 2)
    assert load.sha256 == hashlib.sha256(Path(source).read_bytes()).hexdigest()
    one, other = (workload(source="alpaca-like", num_requests=5, seed=seed) for seed in (0, 1))
    assert one.sha256 != other.sha256
    assert list(one.start()) != list(other.start())


def test_a_part_begins_behind_what_is_skipped_and_has_its_lengths(tmp_path: Path) -> None:
    source = counts(tmp_path, *((10 + i, 1 + i) for i in range(6)))
    part = list(workload(source=source, skip_requests=2, num_requests=3).start())
    assert [(one.req_id, one.prompt_tokens, one.output_tokens) for one in part] == [
        ("r0", 12, 3), ("r1", 13, 4), ("r2", 14, 5),
    ]  # fmt: skip


def test_drawing_without_replacement_takes_each_row_once_in_an_order_of_the_seed(tmp_path: Path) -> None:
    source = counts(tmp_path, *((i, 1) for i in range(1, 101)))
    drawn = [lengths(source=source, sample="without-replacement", seed=seed) for seed in (0, 0, 1)]
    assert sorted(drawn[0]) == lengths(source=source)
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] != sorted(drawn[0])


def test_drawing_with_replacement_repeats_rows_evenly(tmp_path: Path) -> None:
    source = counts(tmp_path, (1, 1), (2, 1))
    found = Counter(lengths(source=source, sample="with-replacement", num_requests=4000))
    assert found[1, 1] / 4000 == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"scale_prompt": 0.5, "scale_output": 2}, [(5, 20), (10, 40), (2, 180)]),
        ({"cap_prompt_tokens": 15, "cap_output_tokens": 25, "min_prompt_tokens": 10}, [(10, 10), (15, 20)]),
        ({"max_output_tokens": 10}, [(10, 10)]),
        ({"max_model_len": 30}, [(10, 10)]),
        ({"max_model_len": 30, "over_context": "cut"}, [(10, 10), (10, 20), (1, 29)]),
        ({"max_model_len": 30, "max_tokens": 10}, [(10, 10), (20, 20), (5, 90)]),
    ],
    ids=["scaled", "cut, then filtered", "filtered", "out of context", "cut to context", "10 are served"],
)
def test_lengths_are_scaled_then_cut_then_filtered_then_fitted_into_the_context(
    tmp_path: Path, fields: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    assert lengths(source=counts(tmp_path, (10, 10), (20, 20), (5, 90)), **fields) == expected


@pytest.mark.parametrize(("own", "expected"), [(None, [20]), (64, [54, 44])])
def test_context_of_the_engine_is_used_where_the_description_leaves_it_open(
    tmp_path: Path, own: int | None, expected: list[int]
) -> None:
    spec = WorkloadSpec(source=counts(tmp_path, (10, 10), (20, 20)), max_model_len=own)
    assert [r.max_tokens for r in build(spec, max_model_len=30).start()] == expected


@pytest.mark.parametrize(("policy", "expected"), [("cap", 990), ("exact", 20), (2048, 990), (64, 64)])
def test_max_tokens_is_the_clients_bound_and_never_beyond_the_context(policy: Any, expected: int) -> None:
    load = workload(source="fixed:10:20", num_requests=1, max_model_len=1000, max_tokens=policy)
    assert next(load.start()).max_tokens == expected


def test_texts_are_estimated_by_their_script_or_counted_by_a_tokenizer_said_so_and_kept_if_asked(
    tmp_path: Path,
) -> None:
    source = jsonl(tmp_path, {"prompt": "a b a", "output": "a a a a a a"})
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert lengths(source=source) == [(1, 3)]
    assert lengths(source=source, tokenizer=str(tmp_path)) == [(3, 6)]
    (estimated,), (counted,) = (workload(source=source, **by).source.notes for by in ({}, {"tokenizer": str(tmp_path)}))
    assert estimated.startswith("rows.jsonl: lengths of texts are estimates, 4 ASCII characters or 1 other to a token")
    assert counted == f"rows.jsonl: lengths of texts are counted by the tokenizer in {tmp_path.name}"
    kept = requests(source=source) + requests(source=source, keep_text=True)
    assert [r.prompt for r in kept] == [None, "a b a"]


def test_texts_without_spaces_count_by_their_characters(tmp_path: Path) -> None:
    """Once a Chinese text was one word, and its length one token."""
    source = jsonl(tmp_path, {"prompt": "\u4f60\u597d" * 40, "output": "\u6211" * 60 + " and four ASCII words"})
    assert lengths(source=source) == [(80, 65)]


def test_bad_rows_are_left_out_if_asked_and_counted(tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"prompt_tokens": 3, "output_tokens": 4}, {"prompt_tokens": 5}, {"prompt_tokens": "x"})
    with pytest.raises(DatasetError, match=r"line 2: output: missing"):
        workload(source=source)
    load = workload(source=source, skip_bad_rows=True)
    assert (load.rows, load.source.bad_rows) == (1, 2)
    assert load.source.notes == ("rows.jsonl: 2 rows cannot be read and are left out",)
    part = {"source": source, "skip_bad_rows": True, "sample": "with-replacement"}
    mixed = workload(mix=[part, {"source": "fixed:1:1"}], num_requests=1)
    assert (mixed.source.bad_rows, mixed.source.notes) == (2, load.source.notes)


def test_output_lengths_without_prompts_borrow_them_from_a_preset_or_a_file(tmp_path: Path) -> None:
    source = tmp_path / "lmsys.csv"
    source.write_text("index,output_token_length,model\n0,40,vicuna\n1,72,llama\n")
    borrowed = {"source": str(source), "prompts_from": "fixed:33:1"}
    assert lengths(**borrowed) == [(33, 40), (33, 72)]
    assert lengths(**borrowed, where={"model": ["llama"]}) == [(33, 72)]
    borrowed["prompts_from"] = counts(tmp_path, (5, 1), (6, 1))
    assert {p for p, _ in lengths(**borrowed, sample="with-replacement", num_requests=50)} <= {5, 6}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_prompt_tokens": 2}, r"rows.jsonl: no row is left after the filters"),
        ({"tokenizer": "nowhere"}, r"tokenizer='nowhere': must be a folder with a tokenizer.json"),
        ({"prompts_from": "alpaca-like"}, r"prompts_from='alpaca-like': must be left out, rows.jsonl has prompts"),
        ({"mix": [{}]}, r"sample='file-order' of rows.jsonl in mix: must be 'with-replacement'"),
    ],
)
def test_file_that_cannot_be_served_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    source = {"source": counts(tmp_path, (1, 1))}
    with pytest.raises(ValueError, match=message):
        workload(**({"mix": [source], "num_requests": 1} if "mix" in fields else source | fields))


@pytest.mark.parametrize(
    ("scale", "prompts", "shared"), [(1.0, [1200, 1536, 100], 2 * 512), (0.25, [300, 384, 25], 2 * 128)]
)
def test_requests_share_the_tokens_of_their_leading_hash_ids_which_shrink_with_the_prompts(
    tmp_path: Path, scale: float, prompts: list[int], shared: int
) -> None:
    first, second, third = requests(source=mooncake(tmp_path), scale_prompt=scale)
    assert [len(r.token_ids or ()) for r in (first, second, third)] == prompts
    assert (common(first, second), common(first, third)) == (shared, 0)


def test_system_prompt_comes_first_for_all_and_counts(tmp_path: Path) -> None:
    first, second = workload(source="fixed:10:20", num_requests=2, system_prompt_tokens=40).start()
    assert first.prompt_tokens == len(first.token_ids or ()) == 50
    assert common(first, second) == 40
    shared, *_ = workload(source=mooncake(tmp_path), system_prompt_tokens=40).start()
    assert (shared.token_ids or ())[:40] == (first.token_ids or ())[:40]
    assert shared.prompt_tokens == 1240


def test_mix_takes_each_part_by_its_weight_and_puts_it_into_its_tier(tmp_path: Path) -> None:
    source = counts(tmp_path, (1, 1), (2, 1))
    load = workload(
        mix=[
            {"source": "fixed:9000:50", "weight": 35, "tier": "long"},
            {"source": source, "sample": "with-replacement", "weight": 65, "tier": "short"},
        ],
        tiers=[{"name": "long"}, {"name": "short"}],
        num_requests=4000,
    )
    found = Counter(r.tier for r in load.start())
    assert found["long"] / 4000 == pytest.approx(0.35, abs=0.02)
    assert all((r.prompt_tokens == 9000) == (r.tier == "long") for r in load.start())
    assert load.name == "35% fixed:9000:50 + 65% rows.jsonl"
    assert load.rows == 2


def test_parts_of_a_mix_draw_from_streams_of_their_own() -> None:
    load = workload(mix=[{"source": "alpaca-like"}, {"source": "alpaca-like", "cap_output_tokens": 5}], num_requests=60)
    parts: dict[bool, list[int]] = {True: [], False: []}
    for request in load.start():
        parts[request.output_tokens <= 5].append(request.prompt_tokens)
    assert parts[True][:10] != parts[False][:10]


def test_a_file_is_read_again_only_if_it_or_what_is_asked_of_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    load = sources.datasets.load
    monkeypatch.setattr(
        sources.datasets, "load", lambda path, *args, **more: (read.append(path), load(path, *args, **more))[1]
    )
    source = counts(tmp_path, (1, 2), (3, 4), (5, 6))
    for fields in (
        {},
        {"rate_per_s": 3.0},
        {"seed": 5},
        {"num_requests": 1},
        {"sample": "with-replacement", "num_requests": 9},
    ):
        workload(source=source, **fields)
    assert len(read) == 1
    assert lengths(source=source, scale_prompt=10.0) == [(10, 2), (30, 4), (50, 6)]
    assert len(read) == 2
    assert lengths(source=counts(tmp_path, (7, 8), (9, 9), (1, 1), (2, 2))) == [
        (7, 8),
        (9, 9),
        (1, 1),
        (2, 2),
    ]
    assert len(read) == 3
    for tokens in range(1, 9):
        workload(source=source, max_output_tokens=tokens)
    assert len(sources._read) == sources._MOST_READ


def test_a_file_that_is_replaced_by_one_of_the_same_size_and_time_is_read_again(tmp_path: Path) -> None:
    source = Path(counts(tmp_path, (1, 2), (3, 4)))
    before, stat = lengths(source=str(source)), source.stat()
    (tmp_path / "other").mkdir()
    other = Path(counts(tmp_path / "other", (5, 6), (7, 8)))
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(other, source)
    assert (source.stat().st_size, source.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert (before, lengths(source=str(source))) == ([(1, 2), (3, 4)], [(5, 6), (7, 8)])


def test_a_pool_is_a_part_of_the_rows(tmp_path: Path) -> None:
    source = counts(tmp_path, *((n, n) for n in range(1, 10)))
    assert lengths(source=source, pool=(2, 4)) == [(3, 3), (4, 4)]
    drawn = lengths(source=source, pool=(2, 4), sample="with-replacement", num_requests=50)
    assert set(drawn) == {(3, 3), (4, 4)}
    with pytest.raises(ValueError, match=r"pool=\(4, 2\): must be two ascending numbers"):
        workload(source=source, pool=(4, 2))
    with pytest.raises(DatasetError, match="no row is left"):
        workload(source=source, pool=(90, 99))
