"""The axes of a serving system: base classes of policies, which say what a class may declare of itself.

A policy is a frozen dataclass of its parameters. What the scheduler wants to know of it besides is a property of its
base class, which it may override by a class variable or a property. A class variable that the base does not know is
refused when the class is made: nobody would ever look at it.
"""

from __future__ import annotations

import enum
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from vllm_ext.contract.preemption import KvDisposition, PreemptionCost
from vllm_ext.contract.request import Ageing, AgeLimit, Origin, Rank, RequestView
from vllm_ext.contract.room import Gate, Room
from vllm_ext.contract.step import Split, Step


class Need(enum.Enum):
    """What a policy does without where a server was not given it; a server says so when it starts."""

    STEP_TIMES = "step times"
    """It goes wrong by as much as the runtime model does."""
    OBJECTIVES = "objectives"
    """It treats all requests alike where none has one."""
    TIER_FOR_PREEMPTED = "preempted KV is recomputed"
    """Host memory for the KV of preempted requests."""
    TIER_FOR_CONVERSATIONS = "conversations are kept on the device only"
    """Host memory for the KV of finished turns."""


_DESCRIPTORS = (property, functools.cached_property, classmethod, staticmethod)


class Policy:
    """One axis' part of a system."""

    @property
    def uses_predictions(self) -> bool:
        """Whether predicted lengths are looked at; where no policy does, no predictor is started."""
        return True

    @property
    def needs(self) -> frozenset[Need]:
        """What it does without where a server was not given it."""
        return frozenset()

    joined: Mapping[type, type] = {}
    """Another policy of this axis -> what stands for both where systems are composed that have one each."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse class variables that no base class declares.

        Raises:
            TypeError: naming the variable, and those that are known.
        """
        super().__init_subclass__(**kwargs)
        if cls.__module__ == __name__:
            return
        known = {name for base in cls.__mro__ if base.__module__ == __name__ for name in vars(base)}
        annotations = inspect.get_annotations(cls)
        for name, value in vars(cls).items():
            is_field = name in annotations and not str(annotations[name]).startswith(("ClassVar", "typing.ClassVar"))
            if name.startswith("_") or is_field or callable(value) or isinstance(value, _DESCRIPTORS):
                continue
            if name not in known:
                allowed = ", ".join(sorted(name for name in known if not name.startswith("_")))
                raise TypeError(f"{cls.__name__}.{name}: a policy may declare {allowed}; parameters need an annotation")


class Ordering(Policy, ABC):
    """Who first? Under ``--scheduling-policy priority``, among requests of one priority."""

    @property
    def ageing(self) -> Ageing | None:
        """How waiting counts against the cost of a rank; None: it does not, and no rank has a cost."""
        return None

    @property
    def age_limit(self) -> AgeLimit | None:
        """When the oldest requests have a share of all admissions, whatever their ranks; None: never."""
        return None

    def prices(self, decode_s: float, prefill_s: float) -> tuple[float, ...]:
        """Return what ranks are made of that changes for all requests at once; none of it is below 0.

        When one of these numbers has changed by a quarter, waiting requests are ranked again, little by little.

        Args:
            decode_s: Time in which a typical request decodes 100 tokens.
            prefill_s: Time in which a prompt of 1,000 tokens is computed.
        """
        return (decode_s, prefill_s)

    @abstractmethod
    def rank(self, request: RequestView, now: float) -> Rank:
        """Return the place of ``request`` at time ``now`` (s); lower keys go first."""

    def running_rank(self, request: RequestView, now: float) -> Rank:
        """Return the place of a running ``request``: the last one is preempted first. The same as `rank`, by default.

        A cost counts for nothing here: its key alone says who goes before whom.
        """
        return self.rank(request, now)


class Sharing(Policy, ABC):
    """Whose turn? Clients take turns in joining; the ordering says which of a client's requests goes first."""

    @property
    def divides(self) -> bool:
        """Whether there are turns at all."""
        return True

    @property
    def chosen_by_clients(self) -> str:
        """What tells clients apart, if they choose it themselves, in words: a server says so when it starts."""
        return ""

    @property
    def prices(self) -> tuple[float, float]:
        """Service that a client is counted for a prompt token that is computed, and for a generated one."""
        return 1.0, 2.0

    @abstractmethod
    def client(self, origin: Origin) -> str:
        """Return the client whose request it is; asked once for each request."""

    def weight(self, client: str) -> float:
        """Return the client's share, above 0: one of 2 is served twice as much as one of 1."""
        return 1.0


class Budget(Policy, ABC):
    """How many tokens? Asked first."""

    @property
    def is_vllms(self) -> bool:
        """Whether it never changes vLLM's own budget: then it need not be asked."""
        return False

    @property
    def stall_free(self) -> bool:
        """Whether decodes go before prefill chunks even when KV memory is about to run out, whatever the ordering.

        Then a prefilling request is the first to leave.
        """
        return False

    @property
    def starts_partly(self) -> bool:
        """Whether a prompt may start before there is KV for all of it, vLLM's ``--no-scheduler-reserve-full-isl``."""
        return False

    @abstractmethod
    def split(self, step: Step) -> Split:
        """Return this step's token budget; nothing is changed by asking."""


class GatePolicy(Policy, ABC):
    """Who must not join, although there is room? Gates of several systems are joined by *and*."""

    @property
    def history(self) -> int:
        """How many finished output lengths it looks at; 0: none."""
        return 0

    @abstractmethod
    def gate(self, step: Step) -> Gate:
        """Return the condition for one step, asked for only where somebody waits."""


class Admission(Policy, ABC):
    """Who may join, and who must leave for it? A selector: walks the queue, asks the room and takes."""

    @property
    def is_vllms(self) -> bool:
        """Whether it does what vLLM does itself, which is then left to it where no gate stands."""
        return False

    @property
    def preempts(self) -> bool:
        """Whether it preempts, which needs KV blocks that can be counted: full attention."""
        return False

    @property
    def device_reserve(self) -> float:
        """Share of the device's blocks that admissions leave to running requests, as vLLM's ``--watermark``."""
        return 0.0

    @abstractmethod
    def select(self, step: Step, room: Room) -> None:
        """Take who joins in this step, and name who leaves for them."""


class Residency(Policy, ABC):
    """Whose KV lives where?"""

    @property
    def device_reserve(self) -> float:
        """Share of the device's blocks that admissions leave to running requests, as vLLM's ``--watermark``."""
        return 0.0

    @property
    def look_ahead_steps(self) -> int:
        """Steps between two times that `leaving_soon` is asked."""
        return 1

    @property
    def tier_options(self) -> Mapping[str, Any]:
        """Options of the KV tier that this policy wants where the user leaves them open."""
        return {}

    @abstractmethod
    def on_preempt(self, request: RequestView, cost: PreemptionCost) -> KvDisposition:
        """Return what becomes of the KV of a request that is preempted; asked where there is a KV tier."""

    def leaving_soon(self, step: Step, room: Room) -> tuple[str, ...]:
        """Return the running requests, by id, whose KV is to be copied before they are preempted."""
        return ()
