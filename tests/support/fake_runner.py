"""A model runner without a model: tokens are a function of (seed, request, position).

The runner sees what a real one sees, vLLM's ``SchedulerOutput``, and nothing else: it keeps its own copy of
each request's tokens and block table, so an inconsistent output of a scheduler is found where a GPU would have
read garbage. With ``verify_kv`` it also remembers what every KV slot holds and checks it before each read.

Follows vLLM's V1 runner (``v1/worker/gpu_model_runner.py``, ``_update_states``) and, where ``scheduler_output``
carries resumed requests as new ones, the V2 runner (``v1/worker/gpu/model_runner.py``). No speculative tokens.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_ext.kv.int8.step import Direction, step_of
from vllm_ext.kv.partial_prefix.layout import ATTRIBUTE, GapLayout
from vllm_ext.simulation.engine.token_runner import EOS_TOKEN_ID

FIRST_TOKEN_ID = 16
"""Sampled tokens start here; smaller ids are special."""

_SPREAD = 2654435761  # odd multiplier that scatters neighbouring positions over the vocabulary


class RunnerError(RuntimeError):
    """A scheduler output that a real model runner would refuse or silently compute garbage from."""


@dataclass
class _Row:
    """The runner's own view of one request."""

    prompt_len: int
    token_ids: list[int]  # prompt and sampled tokens, including those the scheduler has not seen yet
    block_ids: list[int]
    salt: int
    computed: int = 0  # tokens, as a runner counts that does so by itself


@dataclass
class KVLedger:
    """What every slot of the KV pool holds, as a hash of the whole prefix that produced it."""

    block_size: int
    num_blocks: float = math.inf
    """Blocks; ids from here on are records of 8 bits, which no step writes to."""
    epoch: int = 0
    """Mixed into every hash; raised when the weights (and so all KV) are declared stale."""
    slots: dict[int, int] = field(default_factory=dict)

    def move(self, source: int, target: int, num_tokens: int | None) -> None:
        """Copy what a block or a record holds; of one that is not full, nothing behind its tokens is kept."""
        size = self.block_size
        for offset in range(size):
            held = self.slots.pop(target * size + offset, None)
            if num_tokens is None or offset < num_tokens:
                held = self.slots.get(source * size + offset)
                if held is not None:
                    self.slots[target * size + offset] = held

    def check_and_write(self, req_id: str, row: _Row, spans: Sequence[tuple[int, int]]) -> None:
        """Write the positions of ``spans``, and verify that all others before them hold this request's own prefix.

        Args:
            spans: Positions ``[start, end)`` that the step computes, in order; several where there are gaps.

        Raises:
            RunnerError: The block table is too short, or a slot holds another prefix (or nothing).
        """
        end = spans[-1][1]
        if end > len(row.block_ids) * self.block_size:
            raise RunnerError(f"{req_id}: computes up to {end} with {len(row.block_ids)} blocks of {self.block_size}")
        chain, current = self.epoch, 0
        for position in range(end):
            chain = hash((chain, row.token_ids[position]))
            slot = row.block_ids[position // self.block_size] * self.block_size + position % self.block_size
            current += position >= spans[current][1]
            if position >= spans[current][0]:
                if slot >= self.num_blocks * self.block_size:
                    raise RunnerError(f"{req_id}: writes position {position} into a record")
                self.slots[slot] = chain
            elif self.slots.get(slot) != chain:
                raise RunnerError(
                    f"{req_id}: KV of position {position} (block {row.block_ids[position // self.block_size]}) "
                    f"is not that of its own prefix; {list(spans)} is computed, all else claimed to be there"
                )


class FakeRunner:
    """Executes scheduler outputs in order and fabricates what a model would have returned.

    Args:
        seed: Sampled tokens are a function of (seed, request id, position) only.
        block_size: Tokens per KV block.
        vocab_size: Sampled ids are below it.
        output_lengths: Hidden true output length by request id; the runner emits EOS as that token. Requests
            that are absent run to their ``max_tokens``. May be changed while running; schedulers never see it.
        pipelined: Whether steps are scheduled before the previous one returned (async scheduling): then the V1
            runner takes the tokens of a request that sat out a step from the scheduler, as the real one does.
        v2: Follow the V2 runner: it forgets preempted requests, and resumed ones come to it as new.
        verify_kv: Keep the KV ledger and check every read. Costs time proportional to the context.
        num_blocks: Blocks of the pool; ids from here on name records of 8 bits.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        block_size: int = 16,
        vocab_size: int = 4096,
        output_lengths: Mapping[str, int] | None = None,
        pipelined: bool = False,
        v2: bool = False,
        verify_kv: bool = True,
        num_blocks: float = math.inf,
    ) -> None:
        self.seed = seed
        self.vocab_size = vocab_size
        self.output_lengths = output_lengths if output_lengths is not None else {}
        self.recovers_tokens = pipelined and not v2
        self.v2 = v2
        self.num_blocks = num_blocks
        self.ledger = KVLedger(block_size, num_blocks) if verify_kv else None
        self._reads: frozenset[int] = frozenset()
        self._rows: dict[str, _Row] = {}
        self._batch: set[str] = set()  # the persistent batch: ids scheduled in the previous step

    @property
    def num_cached_requests(self) -> int:
        """Requests whose state the runner still keeps; 0 once it was told of every finish."""
        return len(self._rows)

    def token_at(self, req_id: str, output_index: int) -> int:
        """The token this runner samples as output number ``output_index`` (from 0) of a request."""
        return self._sample(req_id, self._salt(req_id), output_index)

    def invalidate_kv(self) -> None:
        """Declare all KV stale, as a weight update does: reading any of it is an error from now on."""
        if self.ledger is not None:
            self.ledger.epoch += 1

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step.

        Returns:
            One sampled token for each request whose context is complete after this step, none for a
            partial prefill.

        Raises:
            RunnerError: The output contradicts what earlier outputs told the runner.
        """
        if output.kv_cache_block_copies or output.scheduled_spec_decode_tokens:
            raise RunnerError("block copies and speculative tokens are not modelled")
        records = step_of(output)
        self._reads = frozenset(() if records is None else records.reads)
        if records is not None and self.ledger is not None:
            for move in records.moves:
                pair = move.block, move.record
                self.ledger.move(*(pair if move.direction is Direction.TO_RECORD else pair[::-1]), move.num_tokens)
        gone = output.finished_req_ids | (output.preempted_req_ids or set()) if self.v2 else output.finished_req_ids
        for req_id in gone:
            self._rows.pop(req_id, None)
        scheduled = output.num_scheduled_tokens
        cached = output.scheduled_cached_reqs
        self._batch = {r for r in self._batch if r in scheduled and r not in cached.resumed_req_ids and r in self._rows}
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            starts[new.req_id] = self._add(new)
        for index, req_id in enumerate(cached.req_ids):
            starts[req_id] = self._update(cached, index, req_id)
        if starts.keys() != scheduled.keys():
            raise RunnerError(f"scheduled {sorted(scheduled)}, but data came for {sorted(starts)}")
        self._batch = set(scheduled)
        req_ids = list(scheduled)
        gaps = getattr(output, ATTRIBUTE, {})
        sampled = [self._run_one(r, starts[r], scheduled[r], gaps.get(r)) for r in req_ids]
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
            sampled_token_ids=sampled,
        )

    def _add(self, new: NewRequestData) -> int:
        if new.req_id in self._rows and not (self.v2 and new.prefill_token_ids == self._rows[new.req_id].token_ids):
            raise RunnerError(f"{new.req_id}: announced as new while the runner still has it")
        if self.v2 != (new.prefill_token_ids is not None):
            raise RunnerError(f"{new.req_id}: output made for the other runner; v2 is {self.v2} here")
        prompt = new.prompt_token_ids or []
        tokens = list(new.prefill_token_ids or prompt)
        self._rows[new.req_id] = _Row(len(prompt), tokens, list(new.block_ids[0]), self._salt(new.req_id))
        computed: int = new.num_computed_tokens
        return computed

    def _update(self, cached: CachedRequestData, index: int, req_id: str) -> int:
        row = self._rows.get(req_id)
        if row is None:
            raise RunnerError(f"{req_id}: scheduled as known, but the runner never saw it or was told it finished")
        num_output_tokens = cached.num_output_tokens[index]
        del row.token_ids[row.prompt_len + num_output_tokens :]
        new_block_ids = cached.new_block_ids[index]
        if req_id in cached.resumed_req_ids:
            if new_block_ids is None:
                raise RunnerError(f"{req_id}: resumed without blocks")
            row.block_ids = list(new_block_ids[0])
        elif new_block_ids is not None:
            row.block_ids.extend(new_block_ids[0])
        if self.recovers_tokens and num_output_tokens and req_id not in self._batch:
            self._recover_tokens(row, cached, req_id, num_output_tokens)
        computed: int = cached.num_computed_tokens[index]
        if self.v2 and computed != row.computed:
            raise RunnerError(f"{req_id}: is to go on at {computed}, but this runner counts by itself: {row.computed}")
        return computed

    def _recover_tokens(self, row: _Row, cached: CachedRequestData, req_id: str, num_output_tokens: int) -> None:
        known = cached.all_token_ids.get(req_id)
        if known is None:
            raise RunnerError(
                f"{req_id}: back in the batch without its tokens; a scheduler that preempts must also take the "
                "id out of prev_step_scheduled_req_ids"
            )
        row.token_ids[row.prompt_len :] = known[-num_output_tokens:]

    def _run_one(self, req_id: str, start: int, num_tokens: int, layout: GapLayout | None) -> list[int]:
        row = self._rows[req_id]
        end = start + num_tokens
        row.computed = end
        self._check_records(req_id, row.block_ids)
        if end > len(row.token_ids):
            raise RunnerError(f"{req_id}: computes up to position {end} but only {len(row.token_ids)} tokens exist")
        if self.ledger is not None:
            spans = [(start, end)] if layout is None else list(layout.spans(start, num_tokens))
            self.ledger.check_and_write(req_id, row, spans)
        if end < len(row.token_ids):
            return []
        token = self._sample(req_id, row.salt, end - row.prompt_len)
        row.token_ids.append(token)
        return [token]

    def _check_records(self, req_id: str, block_ids: Sequence[int]) -> None:
        """Refuse records that the step does not name: a worker would read elsewhere."""
        unknown = [block for block in block_ids if block >= self.num_blocks and block not in self._reads]
        if unknown:
            raise RunnerError(f"{req_id}: reads records {unknown}, and the step names {sorted(self._reads)}")

    def _salt(self, req_id: str) -> int:
        return zlib.crc32(f"{self.seed}:{req_id}".encode())

    def _sample(self, req_id: str, salt: int, output_index: int) -> int:
        length = self.output_lengths.get(req_id)
        if length is not None and output_index + 1 == length:
            return EOS_TOKEN_ID
        mixed = ((salt + output_index + 1) * _SPREAD) & 0xFFFFFFFF
        return FIRST_TOKEN_ID + (mixed >> 8) % (self.vocab_size - FIRST_TOKEN_ID)
