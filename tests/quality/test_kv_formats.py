"""What comes back of KV that was kept in a format."""

from __future__ import annotations

import pytest
import torch

from vllm_ext.quality import kv_formats

KV = torch.randn(2, 3, 64, 16, generator=torch.Generator().manual_seed(0))


def test_kv_comes_back_from_8_bits_where_it_was() -> None:
    values = KV.clone()
    values[:, :, :, 5] = 1.5
    back = kv_formats.int8(32, torch.bfloat16)(values)
    assert back.shape == values.shape
    assert (back - values).abs().max() < 0.05
    assert (back[..., 5] == 1.5).all()
    assert not torch.equal(back, kv_formats.bfloat16(values))
    half = kv_formats.int8(32, torch.bfloat16, every=2)(values)
    assert torch.equal(half[:, :, :32], back[:, :, :32])
    assert torch.equal(half[:, :, 32:], kv_formats.bfloat16(values)[:, :, 32:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_error_is_at_most_half_a_step_of_the_channel(dtype: torch.dtype) -> None:
    values = KV.to(dtype)
    back = kv_formats.int8(64, dtype)(values)
    assert back.dtype == dtype
    step = (values.float().amax(2) - values.float().amin(2)) / 255
    rounding = torch.finfo(dtype).eps * values.float().abs().amax()
    assert ((back.float() - values.float()).abs().amax(2) <= step / 2 * 1.01 + rounding).all()


def test_kv_that_8_bits_cannot_hold_is_refused() -> None:
    values = KV.clone()
    values[1, 2, 3, 4] = float("inf")
    with pytest.raises(kv_formats.NoRecord, match="not finite"):
        kv_formats.int8(32, torch.float32)(values)


def test_others_round_by_value() -> None:
    values = torch.tensor([[[[1.0, 1.0625, 500.0, -1e6]]]])
    assert kv_formats.fp8_e4m3(values).flatten().tolist() == [1.0, 1.0, 448.0, -448.0]
    assert kv_formats.bfloat16(torch.tensor([1 + 2.0**-9])).item() == 1.0
    assert kv_formats.exact(values) is values
