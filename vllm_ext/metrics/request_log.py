"""The request log: which finished requests are written, and what of them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from vllm_ext.config import ExtConfig
from vllm_ext.hints import salt_tag
from vllm_ext.metrics.json_lines import JsonLines

_HASH_ID_BYTES = 6


class RequestLog:
    """Writes the records of finished requests.

    Tenants' salts and hashes of prompts are written as keyed hashes. The key is random and never leaves the process:
    within one run of a server equal ones stay equal, and nobody can find out by trying what was hashed.
    """

    def __init__(self, config: ExtConfig) -> None:
        """Take the options; ``request_log`` must be set."""
        assert config.request_log is not None
        self._file = JsonLines(
            Path(config.request_log), "request_log", max_mib=config.request_log_mib, keep=config.request_log_files
        )
        self._sample = {} if config.request_log_sample == 1 else {"sample": config.request_log_sample}
        self._key = secrets.token_bytes(16)

    def append(self, engine: int, records: Sequence[Mapping[str, Any]]) -> int:
        """Write those of an engine that are in the sample; return how many were lost as the file can't be written."""
        lines = [self._line(engine, record) for record in records if record["sampled"]]
        return self._file.append(lines) if lines else 0

    def _line(self, engine: int, record: Mapping[str, Any]) -> dict[str, Any]:
        line = {"engine": engine, **record, **self._sample}
        del line["sampled"]
        if line["prompt_token_ids"] is None:
            del line["prompt_token_ids"]
        line["salt_tag"] = salt_tag(line.pop("cache_salt"), self._key) or None
        if record["hash_ids"] is not None:
            line["hash_ids"] = [self._hash_id(number) for number in record["hash_ids"]]
        return line

    def _hash_id(self, number: int) -> int:
        return int.from_bytes(blake2b(number.to_bytes(8), key=self._key, digest_size=_HASH_ID_BYTES).digest())
