"""Adds our routes to the API server; installed only with ``admin``, ``kv_tier.admin`` or ``load_report``.

Upstream symbol: ``load_endpoint_plugins``, which vLLM asks for plugins that add routes, right before it builds its
application. Seams tried: an entry point in the group ``vllm.endpoint_plugins`` is what we add, but vLLM loads it only
if the user names it in ``VLLM_PLUGINS``, and warns of it in every server where that is not set; naming it there besides
``--ext-admin`` would say the same thing twice, and would switch off all plugins that are not named. A
``--middleware`` is called before the API key was checked.
Breaks without: no admin endpoint, no load reports over HTTP.
Can go: when a plugin that is asked for by an option of its own need not be named in ``VLLM_PLUGINS``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_ext.hooks.patch import Patch


def _load_endpoint_plugins(
    original: Callable[..., Any], supported_tasks: tuple[str, ...] | None = None, *args: Any, **kwargs: Any
) -> Any:
    from vllm_ext.admin.plugin import AdminPlugin

    plugins = original(supported_tasks, *args, **kwargs)
    ours = AdminPlugin()
    wanted = supported_tasks is not None and set(ours.required_tasks) & set(supported_tasks)
    return [*plugins, ours] if wanted else plugins


HOOKS = (
    Patch(
        target="vllm.plugins:load_endpoint_plugins",
        feature="admin endpoint",
        why="endpoint plugins are loaded only if VLLM_PLUGINS names them, which switches off all others",
        breaks_without="over HTTP no policy is switched, no conversation in the KV tier dropped, and no load told",
        remove_when="a plugin that an option of its own asks for need not be named in VLLM_PLUGINS",
        replacement=_load_endpoint_plugins,
        leave_out="--ext-admin, --kv-tier-admin, --ext-load-report",
        optional=True,
    ),
)
