"""What routers are told of each engine's load, at ``/vllm-ext/load``: only with ``load_report``, and without a key."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from vllm_ext.admin.engines import PREFIX, Engines, admitted

LOAD = "load"
"""Name of the part."""
UTILITY = "vllm_ext_load"
"""Name of the call to an engine core."""

Told = Annotated[Engines, Depends(admitted(LOAD, keyed=False))]
router = APIRouter(prefix=f"{PREFIX}/load", tags=["vllm-ext: load"])


async def reports(engines: Engines) -> list[dict[str, Any]]:
    """Return each engine's report, as `LoadReport.parse` reads it.

    Raises:
        HTTPException: 503: an engine is dead, or does not answer.
    """
    return await engines.ask(UTILITY, [()] * len(engines))


@router.get("")
async def load(engines: Told) -> dict[str, Any]:
    """Return the reports of all engines."""
    return {"engines": [{"engine": number, **report} for number, report in enumerate(await reports(engines))]}
