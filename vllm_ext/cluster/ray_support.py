"""Whether Ray Serve LLM is here, and is one whose methods that ours override are as we read them."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import Any

from vllm_ext.hooks.errors import installed_vllm
from vllm_ext.hooks.fingerprint import fingerprint

INSTALL = "pip install 'vllm-ext[ray]'"
_LLM, _ROUTER = "ray.serve.llm", "ray.serve.request_router"
VERIFIED = {
    f"{_LLM}:LLMServer.start": "1b61275498bdf374",
    f"{_LLM}:LLMServer.__serve_build_asgi_app__": "34c4efc457ce353c",
    f"{_LLM}:LLMServer.record_routing_stats": "573166ca5d06f09c",
    f"{_LLM}:LLMServer.check_health": "fd08c0155718e985",
    f"{_ROUTER}:RequestRouter.update_replicas": "e71085ed4d542215",
    f"{_ROUTER}:RequestRouter.choose_replicas": "b86623e6f8985c64",
    f"{_ROUTER}:RequestRouter.initialize_state": "47c3dfb180d1006e",
    f"{_ROUTER}:RequestRouter.on_replica_actor_died": "52a59fb6d36b6b60",
    f"{_ROUTER}:RequestRouter.on_request_completed": "0f8ac2ce97c3cb04",
}
"""Methods that ours override or call, as of Ray 2.60.0."""


class RayUnsupported(RuntimeError):
    """Ray is missing, or is another one; the message says what to do."""


def verify() -> None:
    """Make sure that this Ray can be used. Takes the seconds that it takes to import.

    Raises:
        RayUnsupported: it can't.
    """
    try:
        found = version("ray")
        modules: dict[str, Any] = {name: importlib.import_module(name) for name in (_LLM, _ROUTER)}
    except (PackageNotFoundError, ImportError) as error:
        raise RayUnsupported(f"Ray Serve LLM is not here ({error}): {INSTALL}") from error
    changed = []
    for symbol, expected in VERIFIED.items():
        module, _, name = symbol.partition(":")
        try:
            if fingerprint(attrgetter(name)(modules[module])) != expected:
                changed.append(name)
        except (AttributeError, LookupError):
            changed.append(name)
    if changed:
        raise RayUnsupported(f"Ray {found} is not one that was verified (changed: {', '.join(changed)}): {INSTALL}")
    server = modules[_LLM].LLMServer
    try:
        if hasattr(server, "_get_default_engine_class"):
            server._get_default_engine_class(server)  # imports the engine, which Ray does only in a replica
    except ImportError as error:
        wanted = f"Ray {found} can't run vLLM {installed_vllm()} ({error})"
        raise RayUnsupported(f"{wanted}: install a vLLM and a Ray that go together, such as 0.32 and 2.60") from error
