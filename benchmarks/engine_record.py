"""Writes the cells of `engine_compare.py --record FILE` as a recording (see `vllm_ext.simulation.recording`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import engine_report
import engine_workload

from vllm_ext.observability import results
from vllm_ext.simulation import recording
from vllm_ext.simulation.recording import ClientRequest, EngineSettings, Header


def append(
    path: Path,
    cell: engine_report.Cell,
    model: str,
    lots: engine_workload.Lots,
    spec: Mapping[str, Any],
    observed: Mapping[str, Any],
) -> None:
    """Append a cell: what its scheduler was told and decided, and what the clients saw."""
    record = observed["record"]
    versions = results.versions()
    versions.pop("commit", None)
    header = Header(
        system=cell.system,
        load=cell.load,
        repeat=cell.repeat,
        model=model,
        versions=versions,
        settings=EngineSettings(**record["settings"]),
        client_start_s=observed["client_start_s"],
        facts={"machine": results.machine(), **cell.metrics},
    )
    requests = [
        ClientRequest(
            system=cell.system,
            load=cell.load,
            repeat=cell.repeat,
            req_id=got["req_id"],
            source_id=request.source_id,
            arrival_s=sent["arrival_s"],
            sent_s=round(got["sent_s"], 6),
            prompt_tokens=len(request.prompt_token_ids),
            output_tokens=request.output_tokens,
            token_times_s=tuple(round(t, 6) for t in got["token_times_s"]),
        )
        for request, sent, got in zip(lots.measured, spec["requests"], observed["requests"], strict=True)
    ]
    recording.append(path, header, record["lines"], requests, dropped=record["dropped"])
