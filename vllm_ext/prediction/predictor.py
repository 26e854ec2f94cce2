"""The interface between the predictor's service and what predicts: a question, an end, and four methods.

A predictor of one's own is named by the option ``predictor.factory``: ``module:callable``, called with the options and
the folder in the predictor's process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from vllm_ext.contract.length_distribution import Prediction


class Prompt(NamedTuple):
    """A request whose output length is asked for."""

    text: str
    """What stands for it (`text.PromptText`)."""
    max_tokens: int
    """The client's bound on the output."""
    model: str
    """Name of the model or adapter that answers."""
    prompt_tokens: int = 0
    """Length of the prompt in tokens of that model; 0 where unknown."""
    conversation: str = ""
    """Id of the session, scoped by tenant; empty for none."""
    turn: int = 0
    """Earlier turns: messages of the assistant in the prompt."""
    tag: str = ""
    """Name of the application, where the client gave one."""
    salt: str = ""
    """Cache salt or tenant: neighbours and a conversation's own lengths never cross salts."""


class FinishedPrompt(NamedTuple):
    """A request that ended."""

    prompt: Prompt
    tokens: int
    """Its output."""
    time_s: float
    """When, in seconds since the epoch."""
    aborted: bool = False
    """Whether the client gave it up: ``tokens`` is a lower bound of the length, not the length."""


class PromptPredictor(Protocol):
    """What can be asked for output lengths."""

    def predict(self, prompts: Sequence[Prompt]) -> Sequence[Prediction | None]:
        """Return a prediction per prompt, None where there is nothing to go by; called by the loop's thread.

        What it raises costs the batch its predictions, and no more.
        """
        ...

    def learn(self, finished: Sequence[FinishedPrompt]) -> None:
        """Take in what ended; called by the learner's thread, with nothing about once per second for upkeep."""
        ...

    def status(self) -> dict[str, int]:
        """Return ``entries``, what is remembered, and ``examples``, what the regression was fitted on."""
        ...

    def close(self) -> None:
        """Keep what was learned and let go of files."""
        ...
