"""What front ends and the predictor's process say to each other: over ZeroMQ, one structure in MessagePack per message.

A front end asks, tells what ended, and pings; the process answers questions, and each ping with its status.
pyzmq and msgspec come with vLLM.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from vllm_ext.contract.length_distribution import LEVELS
from vllm_ext.prediction.predictor import FinishedPrompt, Prompt

MAX_BYTES = 1 << 20
"""Longest message; a prompt's text is cut far below it before it is sent."""
_LONGEST_TOKENS = 2**40

UNKNOWN, OVERLOAD, ERROR = "unknown", "overload", "error"
"""Why there is no prediction: nothing to go by; the queue is full; the predictor failed."""


class Ask(msgspec.Struct, frozen=True, tag="ask", array_like=True):
    """Predict the output length of a request; answered by one `Answer` at most, and not where that comes too late."""

    req_id: str
    prompt: Prompt


class Finished(msgspec.Struct, frozen=True, tag="finished", array_like=True):
    """A request ended: learn it. Acknowledged by `Status.taken`."""

    number: int
    """Counts a front end's messages of this kind, from 1."""
    done: FinishedPrompt
    p50: int = 0
    """What was predicted for it, in tokens; 0 where nothing was."""
    p90: int = 0


class Ping(msgspec.Struct, frozen=True, tag="ping", array_like=True):
    """Say how you are; answered by a `Status`."""


class Answer(msgspec.Struct, frozen=True, tag="answer", array_like=True):
    """The answer to one `Ask`, and what the scheduler takes."""

    req_id: str
    quantiles: tuple[int, ...] = ()
    """Of the output length in tokens, at `length_distribution.LEVELS`; empty where there is no prediction."""
    source: str = ""
    """Who predicts; or why there is no prediction: `UNKNOWN`, `OVERLOAD`, `ERROR`."""


class Status(msgspec.Struct, frozen=True, tag="status", array_like=True):
    """How the predictor is. It comes from the thread that predicts, so that none comes while a prediction hangs."""

    ready: bool = False
    """Whether the model is loaded."""
    busy_s: float = 0.0
    """For how long the learner's thread has been at what it does now: loading or learning; 0 while it rests."""
    taken: int = 0
    """Number of the last `Finished` of the front end that asks which was learned."""
    entries: int = 0
    """Finished requests that are remembered."""
    examples: int = 0
    """Of these, those that the regression was fitted on."""
    learned: int = 0
    """Requests learned since the process started."""
    waiting: int = 0
    """Prompts that wait for their prediction."""
    errors: int = 0
    """Times the predictor raised or gave what is no prediction, and messages that were none."""
    judged: int = 0
    """Predictions whose requests finished, of the last 500."""
    coverage: float = 0.0
    """Share of these that ended within their P90."""
    relative_error: float = 0.0
    """Median of |predicted - true| / true over these."""
    tau: float = 0.0
    """Kendall's tau-b between predicted and true lengths over the last 200 of these."""


Message = Ask | Finished | Ping | Answer | Status

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class BadMessage(ValueError):
    """Bytes that are no message of ours, or what no message can hold."""


def pack(message: Message) -> bytes:
    """Return a message's bytes.

    Raises:
        BadMessage: it is longer than `MAX_BYTES`, or holds a text or number that MessagePack can't.
    """
    try:
        body = _encoder.encode(message)
    except (UnicodeEncodeError, OverflowError) as error:
        raise BadMessage(f"no message: {error}") from error
    if len(body) > MAX_BYTES:
        raise BadMessage(f"a message of {len(body)} bytes, more than {MAX_BYTES}")
    return body


def unpack(body: bytes) -> Message:
    """Return the message of these bytes. Raises BadMessage."""
    try:
        message: Message = _decoder.decode(body)
    # For another form (a ValidationError is a DecodeError), broken UTF-8, deep nesting.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"no message: {error}") from error
    return message


def is_distribution(quantiles: Sequence[int]) -> bool:
    """Whether these are the quantiles of an `Answer` that predicts: nine ascending lengths from 1."""
    return (
        len(quantiles) == len(LEVELS)
        and quantiles[0] >= 1
        and quantiles[-1] <= _LONGEST_TOKENS
        and all(low <= high for low, high in itertools.pairwise(quantiles))
    )
