"""The tier's options: what is refused where the user sees it, and how they travel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_ext.config import ConfigError, ExtConfig, parse, to_dict
from vllm_ext.config.kv_tier import KvTierConfig
from vllm_ext.kv.connector.options import TIER_KEY, keep_from_the_front, tier_of, transfer_config


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
    path = tmp_path / "a" / "b"
    tier = KvTierConfig(gib=1, disk_dir=str(path), disk_gib=0.5, ttl_s=60.0)
    assert not path.parent.exists()
    told = tier_of(transfer_config(tier).kv_connector_extra_config)
    assert (told.disk_dir, told.disk_bytes, told.ttl_s) == (str(path), 2**29, 60.0)
    assert path.is_dir()
    (path / "file").write_text("")
    with pytest.raises(ConfigError, match="can be written"):
        transfer_config(tier.changed(disk_dir=str(path / "file")))


def test_all_options_travel_as_one_object_and_are_checked_where_they_arrive() -> None:
    tier = KvTierConfig(gib=1, bits=8, load="auto", store="ahead", free_fraction=0.5, salt_share=0.5)
    extra = transfer_config(tier).kv_connector_extra_config
    assert tier_of(json.loads(json.dumps(extra))) == tier.resolved({})
    assert not tier_of(extra).disk_dir
    assert tier_of({}) == KvTierConfig().resolved({}), "of a connector that was asked for by hand"
    with pytest.raises(ConfigError, match=r"kv_tier\.load='soon'.*between.*in-step.*auto"):
        tier_of({TIER_KEY: {"load": "soon"}})


def test_options_survive_their_dictionary() -> None:
    config = parse({"kv_tier": {"gib": 2, "bits": 8, "policy": "arc", "store": "ahead", "prompt_only": True}})
    assert config.kv_tier == KvTierConfig(gib=2, bits=8, policy="arc", store="ahead", prompt_only=True)
    assert parse(to_dict(config)) == config
    assert (ExtConfig().kv_tier.host_bytes, config.kv_tier.host_bytes) == (0, 2 * 2**30)


def test_where_gaps_are_not_crossed_conversations_are_kept_from_the_front() -> None:
    transfer = transfer_config(KvTierConfig(gib=1, policy="leading", gaps="fused", load="auto"))
    assert transfer.kv_connector_extra_config["eviction_policy"] == "leading"
    keep_from_the_front(transfer)
    told = tier_of(transfer.kv_connector_extra_config)
    assert (told.policy, told.gaps) == ("retention", "off")
    assert transfer.kv_connector_extra_config["eviction_policy"] == told.policy


DISK = {"gib": 1, "disk_dir": "/d", "disk_gib": 2}


@pytest.mark.parametrize(
    ("field", "options"),
    [
        *(("gib", {"gib": gib}) for gib in (-1, "4", "much", True, [1], float("inf"), float("nan"))),
        *(("bits", {"bits": bits}) for bits in (4, True, "8")),
        ("policy", {"policy": "fifo"}),
        ("store", {"store": "never"}),
        ("prompt_only", {"prompt_only": "yes"}),
        *(("disk_gib", {**DISK, "disk_gib": gib}) for gib in (0, -1, "2")),
        ("disk_gib", {**DISK, "disk_dir": ""}),
        ("disk_dir", {**DISK, "disk_dir": 3}),
        ("disk_dir", {**DISK, "gib": 0}),
    ],
)
def test_options_that_make_no_sense_are_refused(field: str, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"kv_tier\.{field}=") as refused:
        parse({"kv_tier": options})
    assert refused.value.field == f"kv_tier.{field}"
    assert field != "gib" or "must be a number of GiB of at least 0, or auto" in str(refused.value)
