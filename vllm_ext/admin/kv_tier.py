"""What an administrator sees and drops of the KV tier, below ``/vllm-ext/kv-tier``: only with ``kv_tier.admin``."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Path, Query
from pydantic import BaseModel, ConfigDict, Field, model_validator
from vllm.exceptions import VLLMValidationError

from vllm_ext.admin.engines import PREFIX, Engines, admitted
from vllm_ext.config.options import ADMIN_KV_TIER
from vllm_ext.hints import MAX_CONVERSATION_ID_CHARS
from vllm_ext.kv.conversations.admin import MOST_SHOWN

_UTILITY = "vllm_ext_kv_tier"
"""Name of the call to an engine core."""
_MAX_SALT_CHARS = 4096
_CURSOR = r"^[0-9]{1,18}(\.[0-9]{1,18})*$"
"""One number for each engine."""

Admitted = Annotated[Engines, Depends(admitted(ADMIN_KV_TIER))]
router = APIRouter(prefix=f"{PREFIX}/kv-tier", tags=["vllm-ext: KV tier"])


class ConversationRef(BaseModel):
    """Which conversation is meant, by its id, or by name and salt: under another salt a name is another one's."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str | None = Field(default=None, min_length=1, max_length=64)
    """As it is listed."""
    name: str | None = Field(default=None, min_length=1, max_length=MAX_CONVERSATION_ID_CHARS)
    """As its client named it."""
    salt: str | None = Field(default=None, max_length=_MAX_SALT_CHARS)
    """``cache_salt`` of its requests; None: they had none."""

    @model_validator(mode="after")
    def _one_of_both(self) -> ConversationRef:
        if (self.id is None) == (self.name is None) or (self.id is not None and self.salt is not None):
            raise ValueError("give either id, or name and, if its requests have one, salt")
        return self


async def _ask(engines: Engines, action: str, *each: Mapping[str, Any], **arguments: Any) -> list[dict[str, Any]]:
    """Return what each engine's tier answers to an action of ``TierAdmin``. Raises as `Engines.ask` does.

    Args:
        engines: Who are asked.
        action: What is asked.
        each: For each engine the arguments that are its own; none: there are no such.
        arguments: For all.
    """
    asked = [(action, {**arguments, **own}) for own in each or [{}] * len(engines)]
    return [{"engine": number, **answer} for number, answer in enumerate(await engines.ask(_UTILITY, asked))]


@router.get("")
async def statistics(engines: Admitted) -> dict[str, Any]:
    """Return what each engine's tier holds, and what became of what it held."""
    return {"engines": await _ask(engines, "statistics")}


@router.get("/conversations")
async def conversations(
    engines: Admitted,
    cursor: Annotated[str | None, Query(pattern=_CURSOR, max_length=4096)] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_SHOWN)] = 100,
) -> dict[str, Any]:
    """List conversations, the oldest first; the limit is that of each engine, ``next`` the cursor of the next page.

    Raises:
        VLLMValidationError: The cursor is of another number of engines (status 400).
    """
    after = [0] * len(engines) if cursor is None else [int(part) for part in cursor.split(".")]
    if len(after) != len(engines):
        allowed = f"must be next of a page before, of {len(engines)} engines; leave it out to begin anew"
        raise VLLMValidationError(f"cursor={cursor!r}: {allowed}", parameter="query.cursor")
    found = await _ask(engines, "list", *({"cursor": number} for number in after), limit=limit)
    pages = [(answer.pop("cursor"), answer.pop("more")) for answer in found]
    following = ".".join(str(number) for number, _ in pages) if any(more for _, more in pages) else None
    return {"engines": found, "next": following}


@router.get("/conversations/{name:path}")
async def conversation(
    engines: Admitted, name: Annotated[str, Path(min_length=1, max_length=MAX_CONVERSATION_ID_CHARS)]
) -> dict[str, Any]:
    """Show a conversation, under each salt that it has."""
    found = await _ask(engines, "show", name=name)
    if not any(answer["conversations"] for answer in found):
        raise _unknown(ConversationRef(name=name))
    return {"engines": found}


@router.delete("/conversations")
async def empty(engines: Admitted) -> dict[str, Any]:
    """Empty the tier, and the device's prefix cache unless requests that run hold blocks of it."""
    emptied = await engines.ask("reset_prefix_cache", [(False, True)] * len(engines))
    rows = [{"engine": number, "device_emptied": bool(device)} for number, device in enumerate(emptied)]
    return {"engines": rows}


@router.post("/drop")
async def drop(engines: Admitted, ref: ConversationRef) -> dict[str, Any]:
    """Forget a conversation's chunks, but those that copies use now, or that other conversations' chunks follow."""
    answers = await _ask(engines, "drop", **ref.model_dump(exclude_none=True))
    found = [answer for answer in answers if answer["conversation"] is not None]
    if not found:
        raise _unknown(ref, sum(answer["with_other_salts"] for answer in answers))
    return {"engines": found}


def _unknown(ref: ConversationRef, others: int = 0) -> HTTPException:
    said = f"name={ref.name!r}" if ref.id is None else f"id={ref.id!r}"
    text = f"{said}: no such conversation is known"
    if others:
        text += f" with this salt; {others} with others are: give salt, or the id that the list shows"
    return HTTPException(HTTPStatus.NOT_FOUND, text)
