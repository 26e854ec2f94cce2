"""What a front end and the predictor's process say to each other over a Unix socket.

A frame is the length of its body (4 bytes, little endian) and a body in MessagePack: one of the structures below.
"""

from __future__ import annotations

import msgspec

MAX_FRAME_BYTES = 1 << 20
"""Longest body; a prompt is cut far below it before it is sent."""
_LENGTH_BYTES = 4

UNKNOWN, EXPIRED, OVERLOAD, ERROR, ENDED = "unknown", "expired", "overload", "error", "ended"
"""Why there is no prediction: nothing to go by; it waited too long; the queue is full; the predictor failed; the
request ended before its turn came."""


class Ask(msgspec.Struct, frozen=True, tag="ask", array_like=True):
    """Predict the output length of a request; answered by one `Told`."""

    req_id: str
    text: str
    """What stands for the prompt (`prompt_text`), cut."""
    max_tokens: int
    """The client's bound on the output."""
    model: str = ""
    """Name of the model or LoRA adapter that answers."""
    prompt_tokens: int = 0
    """Length of the prompt in tokens of that model; 0 where unknown."""


class Finished(msgspec.Struct, frozen=True, tag="finished", array_like=True):
    """A request ended by itself after so many tokens: learn it."""

    req_id: str
    tokens: int


class Gone(msgspec.Struct, frozen=True, tag="gone", array_like=True):
    """A request was aborted: forget it."""

    req_id: str


class Told(msgspec.Struct, frozen=True, tag="told", array_like=True):
    """The answer to one `Ask`."""

    req_id: str
    tokens: int = 0
    """Predicted output length; 0 where there is no prediction."""
    p90: int = 0
    source: str = ""
    """Who predicts, as of `estimate.SOURCES`; or why there is no prediction: `UNKNOWN`, `EXPIRED`, `OVERLOAD`, `ERROR`,
    `ENDED`."""


class Status(msgspec.Struct, frozen=True, tag="status", array_like=True):
    """How the predictor is, told to every front end when it is ready and about once per second from then on.

    That it comes does not show that predictions do: it is sent while one hangs.
    """

    entries: int = 0
    """Finished requests in the store."""
    learned: int = 0
    """Of these, learned since the process started."""
    waiting: int = 0
    """Prompts that wait for their prediction."""
    answered: int = 0
    """Questions of any front end that left the queue and were answered, since the process started."""
    errors: int = 0
    """Times the predictor raised, or gave what is no prediction."""
    decoder_examples: int = 0
    """Examples the decoder in use was trained on; 0 without one."""
    judged: int = 0
    """Predictions whose requests finished, of the last 500."""
    coverage: float = 0.0
    """Share of these that ended within their P90."""
    relative_error: float = 0.0
    """Median of |predicted - true| / true over these."""
    tau: float = 0.0
    """Kendall's tau-b between predicted and true lengths over the last 200 of these."""


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """The predictor can't start, and trying again will not help: a package is missing, or an option is wrong."""

    reason: str


Question = Ask | Finished | Gone
Answer = Told | Status | Failed

_encoder = msgspec.msgpack.Encoder()
_questions = msgspec.msgpack.Decoder(Question)
_answers = msgspec.msgpack.Decoder(Answer)
_NO_MESSAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises: for another form (its ValidationError is a DecodeError), broken UTF-8, deep nesting."""


class FrameError(ValueError):
    """Bytes that are no frame of ours: the connection can't be used any more. Or a message that no frame can hold."""


def pack(message: Question | Answer) -> bytes:
    """Return the frame of a message.

    Raises:
        FrameError: it is longer than a frame may be, or holds a text or number that MessagePack can't.
    """
    try:
        body = _encoder.encode(message)
    except (UnicodeEncodeError, OverflowError) as error:
        raise FrameError(f"no message: {error}") from error
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(body)} bytes, more than {MAX_FRAME_BYTES}")
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


def read_question(body: bytes) -> Question:
    """Return the message in a body. Raises FrameError if it is none."""
    try:
        question: Question = _questions.decode(body)
    except _NO_MESSAGE as error:
        raise FrameError(f"not a question to a predictor: {error}") from error
    return question


def read_answer(body: bytes) -> Answer:
    """Return the message in a body. Raises FrameError if it is none."""
    try:
        answer: Answer = _answers.decode(body)
    except _NO_MESSAGE as error:
        raise FrameError(f"not an answer of a predictor: {error}") from error
    return answer


class Frames:
    """Cuts a stream of bytes into bodies."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies that are complete now. Raises FrameError for a length that no message has."""
        self._bytes += data
        found = []
        while len(self._bytes) >= _LENGTH_BYTES:
            length = int.from_bytes(self._bytes[:_LENGTH_BYTES], "little")
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {length} bytes, more than {MAX_FRAME_BYTES}")
            end = _LENGTH_BYTES + length
            if len(self._bytes) < end:
                break
            found.append(bytes(self._bytes[_LENGTH_BYTES:end]))
            del self._bytes[:end]
        return found
