"""What an administrator switches of the policies while they serve, at ``/vllm-ext/policy``: only with ``admin``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from vllm.exceptions import VLLMValidationError

from vllm_ext.admin.engines import PREFIX, Engines, admitted
from vllm_ext.config.options import ADMIN_POLICY

_UTILITY = "vllm_ext_policy"
"""Name of the call to an engine core."""

_SENT_DIGITS = 19
"""Shorter numbers have 64 bits at most."""

Admitted = Annotated[Engines, Depends(admitted(ADMIN_POLICY))]
router = APIRouter(prefix=f"{PREFIX}/policy", tags=["vllm-ext: policy"])


def _number(text: str) -> float:
    """Return a whole number, or a float in place of one that is too long to be sent to an engine, which refuses it."""
    return int(text) if len(text) < _SENT_DIGITS else float(text)


@router.get("")
async def settings(engines: Admitted) -> dict[str, Any]:
    """Return the settings of each engine."""
    return await _change(engines, {})


@router.post("")
async def change(engines: Admitted, request: Request) -> dict[str, Any]:
    """Change what is named, from the next step on, in every engine; see ``vllm_ext.scheduling.switch.Settings``.

    Raises:
        VLLMValidationError: A value is not allowed; nothing was changed (status 400).
    """
    try:
        # By hand: FastAPI would read a body before it asks for the key.
        wanted = json.loads(await request.body(), parse_int=_number)
    except (ValueError, RecursionError) as error:
        raise VLLMValidationError(f"body: {error}", parameter="body") from error
    if not isinstance(wanted, dict):
        raise VLLMValidationError("body: must be a JSON object of settings", parameter="body")
    return await _change(engines, wanted)


@router.delete("")
async def reset(engines: Admitted) -> dict[str, Any]:
    """Go back to the settings with which the server was started."""
    return await _change(engines, None)


async def _change(engines: Engines, wanted: Mapping[str, Any] | None) -> dict[str, Any]:
    found = await engines.ask(_UTILITY, [(wanted,)] * len(engines))
    for answer in found:  # engines are started alike, so that either all of them refuse or none
        if problem := answer.get("problem"):
            raise VLLMValidationError(problem, parameter=problem.partition("=")[0])
    return {"engines": [{"engine": number, **answer} for number, answer in enumerate(found)]}
