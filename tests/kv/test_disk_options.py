"""The options of the disk tier, as they are checked where the user sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_ext.config import ConfigError, ExtConfig, parse, to_dict
from vllm_ext.config.kv_tier import KvTierConfig
from vllm_ext.kv.connector.options import TIER_KEY, keep_from_the_front, tier_of, transfer_config


def test_there_is_none_by_default() -> None:
    extra = transfer_config(KvTierConfig(gib=1)).kv_connector_extra_config
    assert not tier_of(extra).disk_dir


def test_with_a_disk_all_is_stored_early_unless_somebody_wants_it_otherwise(tmp_path: Path) -> None:
    def store(wanted: dict[str, str], **options: object) -> str | None:
        return KvTierConfig(gib=1, **options).resolved(wanted).store  # type: ignore[arg-type]

    disk = {"disk_dir": str(tmp_path), "disk_gib": 1}
    assert (store({}), store({}, **disk)) == ("auto", "early")
    assert (store({"store": "ahead"}), store({"store": "ahead"}, **disk)) == ("ahead", "ahead")
    assert (store({"store": "ahead"}, store="auto"), store({}, store="auto", **disk)) == ("auto", "auto")


def test_the_directory_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert KvTierConfig(gib=1, disk_dir="kv/below", disk_gib=2).disk_dir == str(tmp_path / "kv" / "below")
    assert KvTierConfig(gib=1, disk_dir="~/kv", disk_gib=2).disk_dir == "/home/somebody/kv"
    config = ExtConfig(kv_tier=KvTierConfig(gib=1, disk_dir="kv", disk_gib=2))
    monkeypatch.chdir("/")
    assert parse(to_dict(config)) == config, "in the engine's process, wherever that is"


def test_the_directory_is_made_when_a_server_starts(tmp_path: Path) -> None:
    tier = KvTierConfig(gib=1, disk_dir=str(tmp_path / "a" / "b"), disk_gib=0.5)
    assert not (tmp_path / "a").exists()
    extra = transfer_config(tier).kv_connector_extra_config
    assert (tier_of(extra).disk_dir, tier_of(extra).disk_bytes) == (str(tmp_path / "a" / "b"), 2**29)
    assert (tmp_path / "a" / "b").is_dir()


def test_a_time_to_live_holds_for_both_tiers(tmp_path: Path) -> None:
    tier = KvTierConfig(gib=1, disk_dir=str(tmp_path), disk_gib=1, ttl_s=60.0)
    assert tier_of(transfer_config(tier).kv_connector_extra_config).ttl_s == 60.0


def test_all_options_travel_as_one_object_and_are_checked_where_they_arrive() -> None:
    tier = KvTierConfig(gib=1, bits=8, load="auto", store="ahead", free_fraction=0.5, salt_share=0.5)
    extra = transfer_config(tier).kv_connector_extra_config
    assert tier_of(json.loads(json.dumps(extra))) == tier.resolved({})
    assert tier_of({}) == KvTierConfig().resolved({}), "of a connector that was asked for by hand"
    with pytest.raises(ConfigError, match=r"kv_tier\.load='soon'"):
        tier_of({TIER_KEY: {"load": "soon"}})


def test_where_gaps_are_not_crossed_conversations_are_kept_from_the_front() -> None:
    transfer = transfer_config(KvTierConfig(gib=1, policy="leading", gaps="fused", load="auto"))
    assert transfer.kv_connector_extra_config["eviction_policy"] == "leading"
    keep_from_the_front(transfer)
    told = tier_of(transfer.kv_connector_extra_config)
    assert (told.policy, told.gaps) == ("retention", "off")
    assert transfer.kv_connector_extra_config["eviction_policy"] == told.policy


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"gib": 1, "disk_dir": "/d"}, "disk_gib"),
        ({"gib": 1, "disk_dir": "/d", "disk_gib": -1}, "disk_gib"),
        ({"gib": 1, "disk_dir": "/d", "disk_gib": "2"}, "disk_gib"),
        ({"gib": 1, "disk_gib": 2}, "disk_gib"),
        ({"gib": 1, "disk_dir": 3, "disk_gib": 2}, "disk_dir"),
        ({"disk_dir": "/d", "disk_gib": 2}, "disk_dir"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        KvTierConfig(**options)  # type: ignore[arg-type]
    assert refused.value.field == f"kv_tier.{field}"


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can be written"):
        transfer_config(KvTierConfig(gib=1, disk_dir=str(tmp_path / "file"), disk_gib=1))
