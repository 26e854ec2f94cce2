import pytest

from vllm_ext.attention.plan import Kernel, KernelPlan, Kind, plan_of

OWN, STOCK = Kernel.OWN, Kernel.STOCK


def ratios(decode: float, short: float, prefill: float) -> dict[Kind, float]:
    return {Kind.DECODE: decode, Kind.SHORT: short, Kind.PREFILL: prefill}


@pytest.mark.parametrize(
    ("longest", "kind"), [(1, Kind.DECODE), (2, Kind.SHORT), (64, Kind.SHORT), (65, Kind.PREFILL), (8192, Kind.PREFILL)]
)
def test_longest_query_says_what_kind_a_step_is_of(longest: int, kind: Kind) -> None:
    assert Kind.of(longest) is kind


def test_where_pages_look_alike_each_kind_gets_the_faster_kernel_and_vllm_writes() -> None:
    plan = plan_of(ratios(0.5, 1.1, 0.99), pages_alike=True)
    assert plan.serves == {Kind.DECODE: OWN, Kind.SHORT: STOCK, Kind.PREFILL: OWN}
    assert plan.writer is STOCK


@pytest.mark.parametrize(
    ("found", "kernel"),
    [
        (ratios(0.5, 0.9, 0.9), OWN),
        (ratios(0.5, 0.9, 1.9), OWN),
        (ratios(0.5, 0.9, 2.1), STOCK),
        (ratios(0.9, 0.9, 1.2), STOCK),
        (ratios(1.1, 0.2, 0.2), STOCK),
    ],
)
def test_where_they_differ_one_kernel_serves_and_writes_all(found: dict[Kind, float], kernel: Kernel) -> None:
    plan = plan_of(found, pages_alike=False)
    assert (set(plan.serves.values()), plan.writer) == ({kernel}, kernel)


def test_plan_says_who_serves_what_and_why() -> None:
    assert KernelPlan.all(OWN, "asked for").describe("CPU_ATTN") == "attention: vllm-ext serves all steps (asked for)"
    mixed = plan_of(ratios(0.5, 0.7, 1.25), pages_alike=True).describe("CPU_ATTN")
    assert mixed == (
        "attention: CPU_ATTN serves prefill, vllm-ext serves decode and short queries "
        "(measured at start, our time over vLLM's: decode 0.50, short queries 0.70, prefill 1.25)"
    )
