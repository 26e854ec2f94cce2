"""Views of one allocation, and what moves between them, by the definition of the format."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.record_memory import (
    ARENA,
    BLOCKS,
    FORMAT,
    GEOMETRY,
    LAYERS,
    LAYOUT,
    TOKENS,
    allocated,
    device_records,
)
from vllm_ext.kernels.kv_quant import reference
from vllm_ext.kv.int8.codec import pad
from vllm_ext.kv.int8.geometry import ArenaGeometry
from vllm_ext.kv.int8.memory import layer_memory
from vllm_ext.kv.int8.step import Direction, RecordMove, RecordStep


def test_all_layers_share_the_last_pages_and_nothing_else() -> None:
    memory, layers = allocated()
    starts = [layer.pages[layer.scratch].data_ptr() for layer in layers]
    assert set(starts) == {memory.data_ptr() + LAYERS * GEOMETRY.stride_pages * LAYOUT.page_bytes}
    for layer in layers:
        first = layer.records.data_ptr()
        assert first == layer.pages[BLOCKS].data_ptr()
        assert first + layer.records.numel() <= layer.pages[BLOCKS + ARENA].data_ptr()
        assert len(layer.records) == GEOMETRY.num_records > ARENA
        assert layer.wide[-1].data_ptr() == layer.pages[-1].data_ptr()


def test_records_and_blocks_are_written_where_they_belong_in_each_layer() -> None:
    memory, layers = allocated()
    before = memory.clone()
    expected = [reference.quantise(layer.pages, torch.tensor([1, 4]), FORMAT)[0] for layer in layers]
    records = device_records(layers)
    moves = [RecordMove(Direction.TO_RECORD, block, BLOCKS + place) for block, place in ((1, 2), (4, 0))]
    records.move(RecordStep(moves))
    for layer, (one, four) in zip(layers, expected, strict=True):
        assert torch.equal(layer.records[2], one)
        assert torch.equal(layer.records[0], four)
        layer.records[[0, 2]] = 0xFF
    assert torch.equal(memory, before), "nothing else was written"


def test_a_block_that_is_given_away_in_the_same_step_is_read_first() -> None:
    _, layers = allocated()
    records = device_records(layers)
    (one,), _ = reference.quantise(layers[0].pages, torch.tensor([1]), FORMAT)
    records.move(RecordStep([RecordMove(Direction.TO_RECORD, 2, BLOCKS)]))
    back = torch.empty(1, LAYOUT.page_elements, dtype=torch.bfloat16)
    reference.dequantise(layers[0].records[:1].clone(), back, torch.tensor([0]), FORMAT)
    moves = [RecordMove(Direction.TO_RECORD, 1, BLOCKS + 1), RecordMove(Direction.TO_BLOCK, 1, BLOCKS)]
    records.move(RecordStep(moves))
    assert torch.equal(layers[0].records[1], one)
    assert torch.equal(layers[0].pages[1], back[0])


@pytest.mark.parametrize("num_tokens", [1, 7, TOKENS - 1])
def test_what_lies_behind_the_tokens_of_a_block_is_no_part_of_its_record(num_tokens: int) -> None:
    """Reported of vLLM's own INT8 caches (#50749): ranges of partly filled blocks taken over what was there before."""
    _, layers = allocated()
    index = torch.from_numpy(LAYOUT.index)
    for layer in layers:
        layer.pages[3][index[:, :, num_tokens:]] = float("nan")
    held = layers[1].pages[3][index[:, :, :num_tokens]].float()
    records = device_records(layers)
    records.move(RecordStep([RecordMove(Direction.TO_RECORD, 3, BLOCKS + 1, num_tokens)]))
    records.move(RecordStep([RecordMove(Direction.TO_BLOCK, 2, BLOCKS + 1)]))
    found = layers[1].pages[2][index[:, :, :num_tokens]].float()
    ranges = held.amax(2) - held.amin(2)
    assert found.isfinite().all()
    assert ((found - held).abs() <= ranges[:, :, None] / 255 * 0.51 + held.abs() / 128).all()


def test_a_page_with_a_value_that_is_not_finite_comes_back_without_any_that_is() -> None:
    """And without anything of whoever was in that record before."""
    _, layers = allocated()
    records = device_records(layers)
    records.move(RecordStep([RecordMove(Direction.TO_RECORD, 0, BLOCKS)]))
    layers[2].pages[1, 17] = float("inf")
    records.move(RecordStep([RecordMove(Direction.TO_RECORD, 1, BLOCKS)]))
    records.move(RecordStep([RecordMove(Direction.TO_BLOCK, 2, BLOCKS)]))
    assert not layers[2].pages[2].isfinite().any()
    assert layers[1].pages[2].isfinite().all()


def test_padding_repeats_the_last_token() -> None:
    pages = torch.arange(LAYOUT.page_elements, dtype=torch.float32)[None].clone()
    index = torch.from_numpy(LAYOUT.index)
    pad(pages, 0, 3, LAYOUT)
    assert torch.equal(pages[0][index[:, :, :3]], index[:, :, :3].float())
    assert torch.equal(pages[0][index[:, :, 3:]], index[:, :, 2:3].float().expand(-1, -1, TOKENS - 3, -1))


@pytest.mark.parametrize("wrong", [{"num_blocks": BLOCKS - 1, "arena_pages": ARENA + 1}, {"num_layers": 1}])
def test_a_cache_of_another_division_is_refused(wrong: dict[str, Any]) -> None:
    _, layers = allocated()
    cache = layers[1].wide[:BLOCKS]
    with pytest.raises(ValueError, match="must be one of"):
        layer_memory(cache, ArenaGeometry(**{**vars(GEOMETRY), **wrong}))
