"""The hooks themselves: they fit the vLLM installed, come and go as a group, and the documentation lists them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tests.support.upstream import INSTALLED, WITHOUT, is_for_installed, needs
from vllm_ext.cli import patches as command
from vllm_ext.hooks import registry, verified, versions
from vllm_ext.hooks.__main__ import overriding
from vllm_ext.hooks.errors import UpstreamChanged
from vllm_ext.hooks.feature import overridable, target_of
from vllm_ext.hooks.patch import Hook, Patch, Reliance, resolve_owner

HOOKS = registry.hooks()
FITTING = [hook for hook in HOOKS if is_for_installed(hook)]


def name_of(hook: Hook) -> str:
    """What a hook is about, without its module."""
    return hook.target.partition(":")[2]


@pytest.mark.parametrize("hook", FITTING, ids=name_of)
def test_every_hook_fits_the_vllm_installed(hook: Hook) -> None:
    hook.verify()


@pytest.mark.parametrize("hook", HOOKS, ids=name_of)
def test_every_hook_says_why_it_exists(hook: Hook) -> None:
    assert all((hook.feature, hook.why, hook.breaks_without, hook.remove_when, hook.leave_out))


def test_no_symbol_is_changed_twice() -> None:
    changed = [hook.target for hook in HOOKS if not isinstance(hook, Reliance)]
    assert len(set(changed)) == len(changed)


def test_what_our_classes_override_is_relied_upon() -> None:
    """A method of an abstract class, one that only vLLM's newest has, and one that a class below ours overrides."""
    relied = {hook.target for hook in registry.group("kv-tier")}
    offloading = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
    assert "vllm.v1.kv_offload.base:OffloadingWorker.submit_store" in relied
    assert f"{offloading}.scheduler:OffloadingConnectorScheduler.update_state_after_alloc" in relied
    assert not any("__repr__" in target for target in relied), "made up by dataclasses"
    newest = verified.of_version(versions.SUPPORTED[-1])
    assert "vllm.v1.kv_offload.cpu.spec:CPUOffloadingSpec.config_info_keys" in newest


@pytest.mark.parametrize("method", ["lookup", "submit_store"])
def test_an_overridden_method_that_a_stranger_replaced_is_refused(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function stands in another file than its class; what is below it in vLLM is as verified."""
    replaced = "vllm.v1.kv_offload.tiering.fs.manager:FileSystemTierManager"
    owner, name = resolve_owner(f"{replaced}.{method}")
    monkeypatch.setattr(owner, name, stored)
    with pytest.raises(UpstreamChanged, match=f"FileSystemTierManager.{method} is not the verified one"):
        registry.verify("kv-disk")


@pytest.mark.parametrize("version", versions.SUPPORTED)
def test_the_file_of_a_version_names_what_is_relied_upon_and_nothing_else(version: str) -> None:
    """If not: python -m vllm_ext.hooks --source SOURCE --write VERSION."""
    wanted = {hook.target for hook in HOOKS}
    known = set(verified.of_version(version))
    wanted |= {target_of(base, name) for _, classes in overriding() for one in classes
               for name, bases in overridable(one) for base in bases}  # fmt: skip
    assert known - wanted == set()


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in registry.GROUPS])
def test_a_group_is_installed_once_and_undone(name: str) -> None:
    before = {hook.target: stored(hook) for hook in registry.group(name)}
    undo = registry.install(name)
    installed = {hook.target: stored(hook) for hook in registry.group(name)}
    registry.install(name)()
    assert {hook.target: stored(hook) for hook in registry.group(name)} == installed
    undo()
    assert {hook.target: stored(hook) for hook in registry.group(name)} == before


def stored(hook: Hook) -> object:
    owner, name = resolve_owner(hook.target)
    return vars(owner).get(name)


def changed(hook: Hook) -> Hook:
    return dataclasses.replace(hook, verified={"0.0.1": "0" * 16})  # type: ignore[type-var]


def test_a_group_with_one_changed_symbol_is_not_installed_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ext.patches import http_hints

    first, second, third = http_hints.HOOKS
    before = [stored(hook) for hook in http_hints.HOOKS]
    monkeypatch.setattr(http_hints, "HOOKS", (first, changed(second), third))
    with pytest.raises(UpstreamChanged, match="create_chat_completion"):
        registry.install("http")
    assert [stored(hook) for hook in (first, second, third)] == before


def test_all_changed_symbols_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ext.patches import scheduler_reliances

    monkeypatch.setattr(scheduler_reliances, "HOOKS", tuple(changed(h) for h in scheduler_reliances.HOOKS))
    with pytest.raises(UpstreamChanged) as caught:
        registry.verify("scheduler")
    assert all(hook.target in str(caught.value) for hook in scheduler_reliances.HOOKS)


def test_an_unknown_group_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"must be one of base, .*engine-core"):
        registry.install("everything")


def test_the_report_tells_changed_and_missing_from_verified() -> None:
    good = next(hook for hook in HOOKS if isinstance(hook, Reliance))
    gone = dataclasses.replace(good, target="vllm.v1.core.sched.scheduler:Scheduler.no_such_method")
    statuses = registry.report([good, changed(good), gone])
    assert [status.status for status in statuses] == ["verified", "changed", "missing"]
    assert statuses[0].remedy == ""
    assert "install a verified version of vLLM (0.0.1), or leave out --scheduler-cls" in statuses[1].remedy


def test_without_vllm_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "installed_vllm", lambda: "none")
    assert {status.status for status in registry.report()} == {"not-checked"}


def test_the_installed_version_is_among_the_verified_ones() -> None:
    """But for features that say so, see docs/results/versions.md."""
    without = {hook.feature for hook in HOOKS if isinstance(hook, (Patch, Reliance)) and INSTALLED not in hook.versions}
    assert without == WITHOUT[INSTALLED]


def test_the_page_of_hooks_names_each_of_them() -> None:
    page = command.markdown()
    assert [hook.target for hook in HOOKS if f"`{hook.target.removeprefix('vllm.')}`" not in page] == []


def test_the_command_prints_the_report_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--json", "--check"]) == (len(FITTING) < len(HOOKS))
    printed = json.loads(capsys.readouterr().out)
    assert [hook["target"] for hook in printed["hooks"]] == [hook.target for hook in HOOKS]


def test_the_check_fails_if_a_hook_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm_ext.patches import output_handler

    monkeypatch.setattr(output_handler, "HOOKS", tuple(changed(h) for h in output_handler.HOOKS))
    assert command.main([]) == 0
    assert command.main(["--check"]) == 1
    assert "remedy: vLLM" in capsys.readouterr().out
