"""What a step reads in records, as a kernel that knows blocks only gets it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.support.record_memory import BLOCKS, LAYOUT, TOKENS, allocated, device_records
from vllm_ext.attention.records import UnpacksRecords, note_reads, records_behind
from vllm_ext.kv.int8 import worker
from vllm_ext.kv.int8.step import Direction, RecordMove, RecordStep

LENGTHS = torch.tensor([3 * TOKENS, TOKENS + 1], dtype=torch.int32)
JUNK = BLOCKS + 6
"""A record that nobody reads, behind the blocks of a shorter request."""


class Seen:
    """In the place of vLLM's implementation: keeps what it is given."""

    def forward(self, layer: Any, q: Any, k: Any, v: Any, kv_cache: Any, attn_metadata: Any) -> None:
        self.cache, self.metadata = kv_cache, attn_metadata


class Unpacking(UnpacksRecords, Seen):
    pass


@pytest.fixture
def step() -> Iterator[worker.StepAtHand]:
    """A step at hand that reads records 1 and 4, which hold blocks 2 and 3."""
    _, layers = allocated()
    records = device_records(layers)
    moves = [RecordMove(Direction.TO_RECORD, block, BLOCKS + place) for block, place in ((2, 1), (3, 4))]
    records.move(RecordStep(moves))
    worker._current = worker.StepAtHand(records, [BLOCKS + 1, BLOCKS + 4])
    yield worker._current
    worker._current = None


def metadata(*rows: Sequence[int]) -> Any:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

    fields: dict[str, Any] = dict.fromkeys(CPUAttentionMetadata.__annotations__)
    made = CPUAttentionMetadata(**fields)
    made.block_table = torch.tensor(rows, dtype=torch.int32)
    return made


def test_records_are_unpacked_behind_the_last_layer_and_named_there(step: worker.StepAtHand) -> None:
    noted = metadata([1, BLOCKS + 4, BLOCKS + 1], [BLOCKS + 1, 4, JUNK])
    note_reads(noted, LENGTHS, TOKENS, unpack=True)
    for layer in step.records.layers.values():
        pages = layer.pages.clone()
        attention = Unpacking()
        attention.forward(None, None, None, None, layer.wide[:BLOCKS], noted)
        table, first = attention.metadata.block_table, layer.scratch
        assert table[0].tolist() == [1, first + 1, first]
        assert table[1, :2].tolist() == [first, 4]
        assert attention.cache.data_ptr() == layer.wide.data_ptr()
        for block, page in ((2, first), (3, first + 1)):
            error = (attention.cache[page].float() - layer.wide[block].float()).abs().max()
            assert 0 < error < 0.05, "8 bits, and no other block"
        same = torch.equal(layer.pages[:first].view(torch.int16), pages[:first].view(torch.int16))
        assert same, "only scratch pages were written"
    assert noted.block_table[0].tolist() == [1, BLOCKS + 4, BLOCKS + 1], "the next layer finds what this one found"


def test_a_step_that_reads_no_record_passes_through(step: worker.StepAtHand) -> None:
    step.reads = ()
    noted, attention = metadata([1, 2, 3], [4, 0, JUNK]), Unpacking()
    note_reads(noted, LENGTHS, TOKENS, unpack=True)
    cache = next(iter(step.records.layers.values())).wide[:BLOCKS]
    attention.forward(None, None, None, None, cache, noted)
    assert attention.metadata is noted
    assert attention.cache is cache


def test_a_record_of_which_the_step_says_nothing_is_an_error(step: worker.StepAtHand) -> None:
    """It would be read as a block: of another layer, or behind all memory."""
    with pytest.raises(RuntimeError, match=rf"names records \[{BLOCKS + 2}\], and the step was to read"):
        note_reads(metadata([1, BLOCKS + 2, 3], [4, 0, JUNK]), LENGTHS, TOKENS, unpack=True)


def test_our_kernel_gets_the_records_and_no_copies(step: worker.StepAtHand) -> None:
    noted = metadata([1, BLOCKS + 4, BLOCKS + 1], [BLOCKS + 1, 4, JUNK])
    note_reads(noted, LENGTHS, TOKENS, unpack=False)
    assert not hasattr(noted, "vllm_ext_reads")
    layer = step.records.layers["b"]
    found = records_behind(layer.wide[:BLOCKS])
    assert found is not None
    assert found.data_ptr() == layer.records.data_ptr()
    assert found.shape == (step.records.geometry.num_records, step.records.geometry.record_bytes)


def test_without_a_step_nothing_is_known_of_records() -> None:
    """As in a dummy run, whose block table may hold anything."""
    note_reads(metadata([JUNK, JUNK, JUNK]), LENGTHS[:1], TOKENS, unpack=True)
    assert records_behind(torch.zeros(1, LAYOUT.page_elements)) is None
