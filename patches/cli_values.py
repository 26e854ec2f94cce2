"""Carries the values of our flags into ``additional_config["vllm_ext"]``, which reaches every process.

Upstream symbol: ``EngineArgs.from_cli_args``. Seams tried: the parsed arguments are otherwise seen only by vLLM itself;
``EngineArgs`` keeps the attributes it has fields for and drops the rest.
Breaks without: our flags are accepted but have no effect, so this hook and ``cli_flags`` come together.
Can go: with ``cli_flags``.

Spawned API servers and ``vllm bench`` parse or convert the arguments again and pass here too. A flag wins over
``--additional-config``. Without one of our flags the engine's arguments are returned untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_ext.config import KEY, flags, merge_flags
from vllm_ext.hooks.patch import Patch


def _from_cli_args(original: Callable[..., Any], cls: type, args: Any, *rest: Any, **kwargs: Any) -> Any:
    engine_args = original(cls, args, *rest, **kwargs)
    given = flags.given(vars(args))
    if given:
        additional = dict(engine_args.additional_config or {})
        engine_args.additional_config = {**additional, KEY: merge_flags(additional.get(KEY, {}), given)}
        # Spawned API servers get the arguments and read them before our plugin is loaded: they must not need the flags.
        args.additional_config = engine_args.additional_config
    return engine_args


HOOKS = (
    Patch(
        target="vllm.engine.arg_utils:EngineArgs.from_cli_args",
        feature="flags",
        why="EngineArgs drops parsed arguments it has no field for",
        breaks_without="--ext-* flags have no effect",
        remove_when="a general plugin can register arguments",
        replacement=_from_cli_args,
    ),
)
