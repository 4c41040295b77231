"""What is recorded of one decorated call: arguments by name, the result, the token sequences in both."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any

from trackway.decoders import find_tokenizer

from .. import semconv
from ..model import Kind
from . import snapshot
from .scope import Elsewhere, Rollout, Scope
from .streams import StreamTokens, Tokens

if TYPE_CHECKING:
    from .recorder import Recorder

MAX_ITEMS = 1_000
"""Items of a generator that are kept, the last one among them; all are counted."""
_MAX_PARTS = 8  # of a tuple or list that may each hold token sequences


class Target:
    """A decorated function: its name, its kind and the names of its parameters.

    Attributes:
        owner: the object whose method, or which itself, was decorated; None for a plain function.
        streams: whether it is a generator function.
        wrapper: the decorated function itself; set once it exists.
    """

    __slots__ = (
        "_bound",
        "kind",
        "name",
        "owner",
        "positional",
        "signature",
        "streams",
        "variadic",
        "wrapper",
    )

    def __init__(self, fn: Any, kind: Kind, name: str | None) -> None:
        self.kind: Kind = kind
        self.wrapper: Any = None
        self.streams = False
        function = fn
        while isinstance(function, functools.partial):
            function = function.func
        qualified = getattr(function, "__qualname__", None)
        if not isinstance(qualified, str):
            qualified = type(function).__qualname__
        own = qualified.rpartition("<locals>.")[2]
        # A tool is called by its bare name, whatever class it is a method of.
        self.name = snapshot.text(name) if name else own.rpartition(".")[2] if kind == "tool" else own
        if inspect.ismethod(function):
            self.owner = function.__self__
        else:
            self.owner = None if inspect.isroutine(function) else function
        self._bound: dict[type, bool] = {}
        self.positional: tuple[str, ...] = ()
        self.variadic = "args"
        self.signature: inspect.Signature | None = None
        try:
            self.signature = inspect.signature(fn)
        except (TypeError, ValueError):
            return  # some builtins and mocks have none: arguments are recorded as a list
        parameters = self.signature.parameters.values()
        self.positional = tuple(
            item.name
            for item in parameters
            if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)
        )
        self.variadic = next((item.name for item in parameters if item.kind is item.VAR_POSITIONAL), "args")

    def is_bound(self, first: Any) -> bool:
        """Say whether the first argument is the instance, or class, that the function was called on."""
        kind = first if issubclass(type(first), type) else type(first)
        known = self._bound.get(kind)
        if known is None:
            known = self._bound[kind] = any(
                self._is_here(attribute) for base in kind.__mro__ for attribute in list(vars(base).values())
            )
        return known

    def _is_here(self, attribute: Any) -> bool:
        # By its type: isinstance() would run the property __class__ that some proxies have.
        if type(attribute) is classmethod:
            attribute = attribute.__func__
        # Other decorators may stand above ours.
        while attribute is not None and attribute is not self.wrapper:
            attribute = getattr(attribute, "__wrapped__", None) if type(attribute) is FunctionType else None
        return attribute is not None

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Name the arguments as the function's signature does.

        Returns:
            The instance, or class, that it was called on, and the other arguments.
        """
        owner = self.owner
        named = dict(zip(self.positional, args, strict=False))
        if len(args) > len(self.positional):
            named[self.variadic] = list(args[len(self.positional) :])
        if args and self.positional and self.is_bound(args[0]):
            owner = named.pop(self.positional[0])
        named.update(kwargs)
        return owner, named


class Call(Scope):
    """The open span of one decorated call."""

    __slots__ = ("_items", "_owner", "_stream", "_yielded")

    def __init__(
        self,
        recorder: Recorder,
        rollout: Rollout,
        parent: Scope | Elsewhere | None,
        target: Target,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        super().__init__(recorder, rollout, parent, target.name, target.kind)
        self._owner: Any = None
        self._items: list[Any] | None = None
        self._stream: StreamTokens | None = None
        self._yielded = 0
        if target.kind == "llm":
            rollout.generates = True
        if target.streams:
            self.items = ()
        if parent is not None and parent.status != "running":
            self.note(f"{target.name} was called after the call around it had ended; see trackway.detached")
        try:
            self._owner, arguments = target.arguments(args, kwargs)
            tokens, rest = split_tokens(arguments, recorder.token_fields)
            if tokens:
                self.prompt = tokens.pop("prompt", None)
                self.given = tokens or None
            self.inputs = self.copy(rest) if rest else None
        except Exception as error:
            self._lose("arguments", error)

    def succeed(self, result: Any) -> None:
        self.recorder.guard(self._end, result)

    def fail(self, error: BaseException, result: Any = None) -> None:
        self.recorder.guard(self._end, result, error)

    def item(self, item: Any) -> None:
        self._yielded += 1
        self.recorder.guard(self._keep_item, item)

    def stop_early(self) -> None:
        self.add(semconv.STOPPED_EARLY, True)
        self.recorder.guard(self._end, None)

    def _end(self, result: Any, error: BaseException | None = None) -> None:
        try:
            if self.items is not None:
                self._finish_items()
            if result is not None:
                self._keep(result)
            if self.recorder.config.token2text:
                self.tokenizer = self._find_tokenizer()
        finally:
            self._owner = None
            self.close(error)

    def _keep(self, result: Any) -> None:
        try:
            tokens, rest = tokens_of(result, self.recorder.token_fields)
            self.made = tokens or self.made
            self.output = self.copy(rest)
        except Exception as error:
            self._lose("result", error)

    def _keep_item(self, item: Any) -> None:
        try:
            tokens, rest = tokens_of(item, self.recorder.token_fields)
            if tokens:
                if self._stream is None:
                    self._stream = StreamTokens()
                self._stream.add(tokens)
            if self._items is None:
                self._items = []
            if len(self._items) == MAX_ITEMS:
                self._items.pop()
            self._items.append(self.copy(rest))
        except Exception as error:
            self._lose("items", error)

    def _finish_items(self) -> None:
        self.add(semconv.ITEMS_YIELDED, self._yielded)
        self.items = tuple(self._items or ())
        if self._stream is not None:
            self.made = self._stream.whole()

    def _find_tokenizer(self) -> Any:
        """Give the tokenizer of the object that was called, or else of one whose method called it.

        Looked for when the call ends, since many objects load theirs at first use.
        """
        scope: Scope | Elsewhere | None = self
        while isinstance(scope, Call):
            tokenizer = None if scope._owner is None else find_tokenizer(scope._owner)
            if tokenizer is not None:
                return tokenizer
            scope = scope.parent
        return None

    def _lose(self, what: str, error: Exception) -> None:
        self.note(snapshot.clean(f"{what} lost: {type(error).__name__}: {snapshot.message(error)}"))
        self.recorder.trouble(f"could not record the {what} of a call", error)


def tokens_of(value: Any, names: Mapping[str, str], depth: int = 2) -> tuple[Tokens | None, Any]:
    """Find the token sequences in a result; those further inside are found by the writer.

    Args:
        value: what a function returned.
        names: field name -> what it holds: ``prompt``, ``response``, ``mask`` or ``logprobs``.
        depth: how many tuples and lists to look into, one inside the other.

    Returns:
        The sequences by what they are (None when there are none), and the value without them.
    """
    kind = type(value)
    if kind is str or value is None or kind is int or kind is float or kind is bool:
        return None, value
    if kind is tuple or kind is list:
        if not depth or len(value) > _MAX_PARTS:
            return None, value
        found: Tokens = {}
        parts = list(value)
        for place, part in enumerate(value):
            tokens, parts[place] = tokens_of(part, names, depth - 1)
            if tokens:
                if not found.keys().isdisjoint(tokens):
                    return None, value  # a batch, of which no one is the turn's: the writer sorts it out
                found.update(tokens)
        return (found, parts) if found else (None, value)
    fields = snapshot.fields(value)
    if not fields or names.keys().isdisjoint(fields):
        return None, value
    tokens, rest = split_tokens(fields, names)
    if tokens and not snapshot.is_record(value) and kind is not dict:
        # Of an object whose class declares no fields only what is plainly data is shown.
        public = snapshot.shown(value, names) or {}
        rest = {name: item for name, item in rest.items() if name in public}
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
