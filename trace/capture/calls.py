"""What is recorded of one decorated call: arguments by name, the result, the token sequences in both."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .. import semconv
from ..model import Kind
from . import snapshot
from .scope import Rollout, Scope

if TYPE_CHECKING:
    from .recorder import Recorder

MAX_ITEMS = 1_000
"""Items of a generator that are kept; all are counted."""
_MAX_PARTS = 8  # of a tuple or list that may each hold token sequences

Tokens = dict[str, tuple[Any, ...]]


class Target:
    """A decorated function: its name, its kind and the names of its parameters.

    Attributes:
        wrapper: the decorated function itself; set once it exists.
    """

    __slots__ = ("_bound", "_name", "keywords", "kind", "name", "positional", "variadic", "wrapper")

    def __init__(self, fn: Any, kind: Kind, name: str | None) -> None:
        self.kind: Kind = kind
        self.wrapper: Any = None
        function = getattr(fn, "func", fn)
        qualified = getattr(function, "__qualname__", None)
        if not isinstance(qualified, str):
            qualified = type(function).__qualname__
        self.name = name or qualified.rpartition("<locals>.")[2]
        plain = getattr(function, "__name__", None)
        self._name = plain if isinstance(plain, str) else ""
        self._bound: dict[type, bool] = {}
        self.positional: tuple[str, ...] = ()
        self.variadic = "args"
        try:
            parameters = inspect.signature(fn).parameters.values()
        except (TypeError, ValueError):
            return  # some builtins and mocks have none: arguments are recorded as a list
        self.positional = tuple(
            item.name
            for item in parameters
            if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)
        )
        self.variadic = next((item.name for item in parameters if item.kind is item.VAR_POSITIONAL), "args")

    def is_bound(self, first: Any) -> bool:
        """Say whether the first argument is the instance, or class, that the function was called on."""
        kind = first if isinstance(first, type) else type(first)
        known = self._bound.get(kind)
        if known is None:
            known = self._bound[kind] = any(
                self._is_here(vars(base).get(self._name)) for base in kind.__mro__
            )
        return known

    def _is_here(self, attribute: Any) -> bool:
        if isinstance(attribute, classmethod):
            attribute = attribute.__func__
        # Other decorators may stand above ours.
        while attribute is not None and attribute is not self.wrapper:
            attribute = getattr(attribute, "__wrapped__", None) if inspect.isfunction(attribute) else None
        return attribute is not None

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Name the arguments as the function's signature does, the instance left out."""
        named = dict(zip(self.positional, args, strict=False))
        if len(args) > len(self.positional):
            named[self.variadic] = list(args[len(self.positional) :])
        if args and self.positional and self.is_bound(args[0]):
            del named[self.positional[0]]
        named.update(kwargs)
        return named


class Call(Scope):
    """The open span of one decorated call."""

    __slots__ = ("_items", "_yielded")

    def __init__(
        self,
        recorder: Recorder,
        rollout: Rollout,
        parent: Scope | None,
        target: Target,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        super().__init__(recorder, rollout, parent, target.name, target.kind)
        arguments = target.arguments(args, kwargs)
        self.prompt, rest = split_tokens(arguments, recorder.token_fields)
        self.inputs = recorder.snapshot(rest) if rest else None
        self._items: list[Any] | None = None
        self._yielded = 0

    def succeed(self, result: Any) -> None:
        self.recorder.guard(self._succeed, result)

    def _succeed(self, result: Any) -> None:
        try:
            self._keep(result)
        finally:
            self.close()

    def _keep(self, result: Any) -> None:
        self.response, rest = tokens_of(result, self.recorder.token_fields)
        self.output = self.recorder.snapshot(rest)

    def fail(self, error: BaseException) -> None:
        self.recorder.guard(self.close, error)

    def item(self, item: Any) -> None:
        self._yielded += 1
        if self._items is None:
            self._items = []
        if len(self._items) < MAX_ITEMS:
            self._items.append(self.recorder.snapshot(item))

    def succeed_stream(self, value: Any) -> None:
        self.recorder.guard(self._succeed_stream, value)

    def _succeed_stream(self, value: Any) -> None:
        try:
            self._count()
            if value is not None:
                self._keep(value)
        finally:
            self.close()

    def stop_early(self) -> None:
        self.recorder.guard(self._stop_early)

    def _stop_early(self) -> None:
        try:
            self._count()
            self.extra = {**(self.extra or {}), semconv.STOPPED_EARLY: True}
        finally:
            self.close()

    def _count(self) -> None:
        self.extra = {semconv.ITEMS_YIELDED: self._yielded}
        self.items = tuple(self._items or ())


def tokens_of(value: Any, names: Mapping[str, str]) -> tuple[Tokens | None, Any]:
    """Find the token sequences in a result.

    Args:
        value: what a function returned.
        names: field name -> what it holds: ``prompt``, ``response``, ``mask`` or ``logprobs``.

    Returns:
        The sequences by what they are (None when there are none), and the value without them.
    """
    kind = type(value)
    if kind is str or value is None or kind is int or kind is float or kind is bool:
        return None, value
    if (kind is tuple or kind is list) and 0 < len(value) <= _MAX_PARTS:
        for place, part in enumerate(value):
            tokens, rest = tokens_of(part, names)
            if tokens:
                return tokens, [*value[:place], rest, *value[place + 1 :]]
        return None, value
    fields = snapshot.fields(value)
    if not fields or names.keys().isdisjoint(fields):
        return None, value
    tokens, rest = split_tokens(fields, names)
    if tokens and not isinstance(value, Mapping) and not snapshot.is_record(value):
        # An object whose class declares no fields is shown by the plain values beside its tokens.
        rest = {
            name: item for name, item in rest.items() if isinstance(item, (str, int, float, bool, list, dict))
        }
    return (tokens, rest) if tokens else (None, value)


def split_tokens(fields: Mapping[str, Any], names: Mapping[str, str]) -> tuple[Tokens | None, dict[str, Any]]:
    """Take the token sequences out of named values; the first of a kind wins."""
    if names.keys().isdisjoint(fields):
        return None, fields  # type: ignore[return-value]
    tokens: Tokens = {}
    rest: dict[str, Any] = {}
    for name, value in fields.items():
        what = names.get(name)
        if what is not None and what not in tokens:
            found = snapshot.sequence(value)
            if found is not None:
                tokens[what] = found
                continue
        rest[name] = value
    return tokens or None, rest
