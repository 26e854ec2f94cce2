"""What the hooks of one feature have in common, and the reliances that follow from what its classes override."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from vllm_ext.hooks.patch import Patch, Reliance


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A feature that hooks are for; fields are those of `Hook`."""

    name: str
    breaks_without: str
    remove_when: str
    leave_out: str = "--scheduler-cls and the vllm_ext options"
    optional: bool = False
    only: tuple[str, ...] = ()

    def patch(self, target: str, why: str, replacement: Callable[..., Any], **more: Any) -> Patch:
        """Return a patch for the feature."""
        return Patch(target=target, why=why, replacement=replacement, only=self.only, **{**self._texts, **more})

    def relies(self, on: Mapping[str, str]) -> tuple[Reliance, ...]:
        """Return a reliance on each function, given with why it must be the one we read."""
        return tuple(Reliance(target=target, why=why, only=self.only, **self._texts) for target, why in on.items())

    def overrides(self, classes: tuple[str, ...]) -> tuple[Reliance, ...]:
        """Return a reliance on each method of vLLM's that classes of ours override: what we call, and who calls us.

        Args:
            classes: ``package.module:Class``, the most derived ones.
        """
        return self.relies(_overridden(classes))

    @property
    def _texts(self) -> dict[str, Any]:
        return {
            "feature": self.name,
            "breaks_without": self.breaks_without,
            "remove_when": self.remove_when,
            "leave_out": self.leave_out,
            "optional": self.optional,
        }


@functools.cache  # a scheduler is verified whenever one is built, and classes stay what they are
def _overridden(classes: tuple[str, ...]) -> Mapping[str, str]:
    """Return which methods of vLLM's classes of ours override, by target, and in which class."""
    found = {}
    for qualified in classes:
        for name, bases in overridable(qualified):
            base = next((base for base in bases if _is_written(base, name)), None)
            if base is not None:
                found[target_of(base, name)] = f"is overridden in `{qualified.partition(':')[2]}`"
    return found


def overridable(qualified: str) -> Iterator[tuple[str, list[type]]]:
    """Yield the methods of a class of ours, with the classes of vLLM's below it that may have them, the nearest first.

    Args:
        qualified: ``package.module:Class``.
    """
    module, _, name = qualified.partition(":")
    mro = getattr(importlib.import_module(module), name).__mro__
    ours = [cls for cls in mro if cls.__module__.startswith("vllm_ext.")]
    bases = [cls for cls in mro if cls.__module__.startswith("vllm.")]
    methods = {name for cls in ours for name in vars(cls) if _is_written(cls, name)}
    yield from ((name, bases) for name in sorted(methods))


def target_of(base: type, name: str) -> str:
    """Return how a method of a class is named as a target."""
    return f"{base.__module__}:{base.__qualname__}.{name}"


def _is_written(cls: type, name: str) -> bool:
    """Whether a class has a method of its own that stands in a file, as those that dataclasses make up do not.

    The file may be a stranger's, who replaced it.
    """
    value = vars(cls).get(name)
    function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    return isinstance(function, FunctionType) and inspect.unwrap(function).__code__.co_filename != "<string>"
