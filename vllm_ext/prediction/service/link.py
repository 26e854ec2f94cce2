"""A front end's end of the socket: never waits. What can't be sent at once is kept, up to a bound."""

from __future__ import annotations

import socket
from collections import deque
from pathlib import Path

from vllm_ext.prediction.service.messages import Answer, FrameError, Frames, Question, pack, read_answer

_READ_BYTES = 1 << 16
_MAX_READS = 64


class LinkBroken(OSError):
    """The other side is gone, or is no predictor. The message goes on from "the length predictor"."""


class Link:
    """A connection that was made; every method returns at once."""

    def __init__(self, path: Path, *, max_unsent: int) -> None:
        """Connect.

        Args:
            path: The predictor's socket.
            max_unsent: Messages kept while the socket takes no more.

        Raises:
            OSError: nobody listens there (yet).
        """
        self._max_unsent = max_unsent
        self._unsent: deque[bytes] = deque()
        self._frames = Frames()
        self._ended = ""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)  # connecting to a Unix socket succeeds or fails at once
            self._socket.connect(str(path))
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor, for an event loop."""
        return self._socket.fileno()

    @property
    def unsent(self) -> int:
        """Messages that wait for room in the socket."""
        return len(self._unsent)

    def send(self, message: Question) -> bool:
        """Send a message, or keep it to be sent by `flush`; False where there is no room for it.

        Raises:
            LinkBroken: see there. What the other side said before it went can still be received.
            FrameError: the message can't be sent to anybody.
        """
        frame = pack(message)
        if len(self._unsent) >= self._max_unsent:
            self.flush()
        if len(self._unsent) >= self._max_unsent:
            return False
        self._unsent.append(frame)
        self.flush()
        return True

    def flush(self) -> None:
        """Send what the socket takes. Raises LinkBroken."""
        while self._unsent:
            frame = self._unsent[0]
            try:
                sent = self._socket.send(frame)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise LinkBroken(f"is gone ({error})") from error
            if sent < len(frame):
                self._unsent[0] = frame[sent:]
                return
            self._unsent.popleft()

    def receive(self) -> list[Answer]:
        """Return what has come. Raises LinkBroken, but not before all that came before the end was returned."""
        found: list[Answer] = []
        for _ in range(_MAX_READS):
            if self._ended:
                break
            try:
                data = self._socket.recv(_READ_BYTES)
                found += map(read_answer, self._frames.feed(data))
                if not data:
                    self._ended = "hung up"
            except (BlockingIOError, InterruptedError):
                break
            except FrameError as error:
                self._ended = f"can't be understood: {error}"
            except OSError as error:
                self._ended = f"is gone ({error})"
        if self._ended and not found:
            raise LinkBroken(self._ended)
        return found

    def close(self) -> None:
        """Hang up."""
        self._socket.close()
