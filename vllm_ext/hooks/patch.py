"""Three kinds of hook: `Patch` wraps a function, `Addition` adds one, `Reliance` only insists that one is unchanged.

A hook says what it touches, with which versions of vLLM it was verified, and why it exists. None has an effect until it
is applied, and applying decides completely before it changes anything.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, MappingProxyType
from typing import Any, NamedTuple

from vllm_ext.hooks.errors import UpstreamChanged, UpstreamMissing, installed_vllm
from vllm_ext.hooks.fingerprint import fingerprint
from vllm_ext.hooks.verified import of_target

Undo = Callable[[], None]
_PATCH = "_vllm_ext_patch"
_WRAPPER = "_vllm_ext_wrapper"


class Symbol(NamedTuple):
    """Where a function lives and what stands there."""

    owner: Any
    """Module or class whose ``__dict__`` holds it."""
    name: str
    stored: Any
    """What the owner holds: the function, or the staticmethod or classmethod around it."""
    function: Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Hook:
    """One point at which we depend on vLLM's code."""

    target: str
    """``package.module:Class.method`` or ``package.module:function``."""

    feature: str
    """Which of our features needs it."""

    why: str
    """What we do there, and which supported seam was not enough."""

    breaks_without: str
    """What a user would lose."""

    remove_when: str
    """What must come upstream before it can go."""

    leave_out: str = "--scheduler-cls and the vllm_ext options"
    """What a user leaves out to run without this hook."""

    optional: bool = False
    """Whether no system needs it: only who asks for what would be left out."""

    @property
    def kind(self) -> str:
        """Name of the kind, in lower case."""
        return type(self).__name__.lower()

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions of vLLM it was verified with; empty where the code does not matter."""
        return ()

    def verify(self) -> str:
        """Return what was found, fit for a report, or raise if vLLM is not as this hook needs it.

        Raises:
            UpstreamMissing: The symbol is gone, or can't be imported.
            UpstreamChanged: It is not one of the verified ones.
        """
        raise NotImplementedError

    def _remedy(self) -> str:
        known = ", ".join(self.versions)
        install = f"install a verified version of vLLM ({known})" if known else "install another version of vLLM"
        return f"vLLM {installed_vllm()} is installed; {install}, or leave out {self.leave_out}"


@dataclass(frozen=True, kw_only=True)
class _Verified(Hook):
    """A hook on a function whose body was read by us."""

    only: tuple[str, ...] = ()
    """Versions of vLLM that it is for; empty: all that are supported."""

    verified: Mapping[str, str] | None = None
    """vLLM version -> fingerprint of the upstream function; None: as the files of the versions have it."""

    def __post_init__(self) -> None:
        known = of_target(self.target) if self.verified is None else self.verified
        of_ours = {version: found for version, found in known.items() if version in (self.only or known)}
        object.__setattr__(self, "verified", MappingProxyType(of_ours))

    @property
    def versions(self) -> tuple[str, ...]:
        return tuple(self.verified or ())

    def verify(self) -> str:
        self._check(self._resolve().function)
        return "as verified"

    def _resolve(self) -> Symbol:
        try:
            return resolve(self.target)
        except LookupError as error:
            raise UpstreamMissing(f"{self.target} is missing: {error}; {self._remedy()}") from error

    def _check(self, function: Callable[..., Any]) -> None:
        try:
            found = fingerprint(function, ignore=_is_ours)
        except LookupError as error:
            raise UpstreamChanged(f"{self.target} can't be checked: {error}; {self._remedy()}") from error
        if found not in (self.verified or {}).values():
            raise UpstreamChanged(f"{self.target} is not the verified one (found {found}); {self._remedy()}")


@dataclass(frozen=True, kw_only=True)
class Reliance(_Verified):
    """A function that is used, overridden or steered through its state, and must therefore be the one we read."""


@dataclass(frozen=True, kw_only=True)
class Patch(_Verified):
    """Wraps an upstream function, method, staticmethod or classmethod."""

    replacement: Callable[..., Any]
    """Called with the original first, then with the arguments of the call."""

    also_rebind: tuple[str, ...] = ()
    """``module:name`` of modules that may have imported the original by name before."""

    def apply(self, *, check: bool = True) -> Undo:
        """Install once and return an undo.

        Args:
            check: Compare with the verified fingerprints. Without it the replacement must itself call `verify` before
                it does anything that upstream would not.

        Raises:
            UpstreamMissing, UpstreamChanged: Nothing was changed.
        """
        symbol = self._resolve()
        if self._installed_in(symbol.function):
            return _nothing
        if check:
            self._check(symbol.function)
        importers = self._importers(symbol.stored)
        stored = _like(symbol.stored, self._wrap(symbol.function))
        for owner, name in [(symbol.owner, symbol.name), *importers]:
            setattr(owner, name, stored)

        def undo() -> None:
            for owner, name in [(symbol.owner, symbol.name), *importers]:
                if vars(owner).get(name) is stored:  # else somebody wrapped ours since and holds on to it
                    setattr(owner, name, symbol.stored)

        return undo

    def _installed_in(self, function: Any) -> bool:
        while function is not None:
            if _is_ours(function) and getattr(function, _PATCH) is self:
                return True
            function = getattr(function, "__wrapped__", None)
        return False

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        replacement = self.replacement
        if inspect.iscoroutinefunction(original):

            @functools.wraps(original)
            async def wrapper(*args: Any, **kwargs: Any) -> Any:
                return await replacement(original, *args, **kwargs)

        else:

            @functools.wraps(original)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                return replacement(original, *args, **kwargs)

        setattr(wrapper, _PATCH, self)
        setattr(wrapper, _WRAPPER, wrapper)  # a stranger's functools.wraps copies attributes; it can't copy identity
        return wrapper

    def _importers(self, stored: Any) -> list[tuple[Any, str]]:
        found = []
        for place in self.also_rebind:
            module_name, _, name = place.partition(":")
            module = sys.modules.get(module_name)
            if module is None:
                continue  # it will import the wrapper
            if vars(module).get(name) is not stored:
                raise UpstreamChanged(f"{place} is not {self.target}; {self._remedy()}")
            found.append((module, name))
        return found


@dataclass(frozen=True, kw_only=True)
class Addition(Hook):
    """Adds a function under a name that upstream does not have."""

    value: Callable[..., Any]
    """The function; ``self`` comes first if it becomes a method."""

    def verify(self) -> str:
        """Return whether the name is free or ours already; raise UpstreamChanged if upstream has something under it."""
        owner, name = self._resolve()
        if hasattr(owner, name) and getattr(owner, name) is not self.value:
            raise UpstreamChanged(f"{self.target} exists already and is not ours; {self._remedy()}")
        return "name is free" if not hasattr(owner, name) else "added"

    def apply(self) -> Undo:
        """Add once and return an undo. Raises as `verify` does, changing nothing."""
        if self.verify() == "added":
            return _nothing
        owner, name = self._resolve()
        setattr(owner, name, self.value)

        def undo() -> None:
            if vars(owner).get(name) is self.value:
                delattr(owner, name)

        return undo

    def _resolve(self) -> tuple[Any, str]:
        try:
            return resolve_owner(self.target)
        except LookupError as error:
            raise UpstreamMissing(f"{self.target} can't be added: {error}; {self._remedy()}") from error


def resolve_owner(target: str) -> tuple[Any, str]:
    """Return the module or class that holds ``target`` and the name in it. Raises LookupError, naming what is gone."""
    module_name, separator, qualname = target.partition(":")
    if not separator or not qualname:
        raise ValueError(f"target={target!r}: must be package.module:Class.method or package.module:function")
    try:
        owner: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise LookupError(f"module {module_name} can't be imported ({error})") from error
    *path, name = qualname.split(".")
    for part in path:
        if part not in vars(owner):
            raise LookupError(f"{module_name} has no {part}")
        owner = vars(owner)[part]
    return owner, name


def resolve(target: str) -> Symbol:
    """Return the function that ``target`` names. Raises LookupError if it is gone, inherited, or no plain function."""
    owner, name = resolve_owner(target)
    if name not in vars(owner):
        raise LookupError(f"{getattr(owner, '__qualname__', owner.__name__)} does not define {name}")
    stored = vars(owner)[name]
    function = stored.__func__ if isinstance(stored, (staticmethod, classmethod)) else stored
    if not isinstance(function, FunctionType):
        raise LookupError(f"{name} is a {type(function).__name__}, no plain function")
    return Symbol(owner, name, stored, function)


def _is_ours(function: Any) -> bool:
    return getattr(function, _WRAPPER, None) is function


def _like(stored: Any, wrapper: Callable[..., Any]) -> Any:
    return type(stored)(wrapper) if isinstance(stored, (staticmethod, classmethod)) else wrapper


def _nothing() -> None:
    """Undo of what was not done."""
