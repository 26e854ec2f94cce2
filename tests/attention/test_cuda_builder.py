"""What the builder of our backend on CUDA promises before there is a step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.attention.backend import AttentionCGSupport

from tests.support.script import told
from vllm_ext.attention.cuda import CudaBuilder
from vllm_ext.attention.support import KEY


@pytest.mark.parametrize(
    ("options", "support"),
    [
        ({"attention": {"kernel": "own"}}, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE),
        ({"attention": {"kernel": "own"}, "kv_tier": {"device_int8_share": 0}},
         AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE),
        ({"attention": {"kernel": "own"}, "kv_tier": {"device_int8_share": 0.3}}, AttentionCGSupport.NEVER),
        ({"attention": {"kernel": "stock"}, "kv_tier": {"device_int8_share": 0.3}}, AttentionCGSupport.NEVER),
    ],
    ids=["own kernel", "own kernel, tier on the host", "own kernel, INT8 on the device", "INT8 on the device"],
)  # fmt: skip
def test_decode_is_captured_in_a_graph_unless_steps_may_read_int8(options: Any, support: AttentionCGSupport) -> None:
    config: Any = SimpleNamespace(additional_config={KEY: options})
    assert CudaBuilder.get_cudagraph_support(config, None) is support


def test_a_warm_up_compiles_every_variant_that_steps_launch() -> None:
    """However many requests, blocks and tokens there are: of those numbers no kernel has a variant."""
    found = told(Path(__file__).with_name("launches_script.py"))
    assert found["missing"] == []
    assert found["warm"] == found["served"] == 24
