"""A finished scope -> one encoded OTLP span. Runs on the writer's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import orjson

from .. import semconv
from ..model import Kind, Side
from ..store import otlp
from . import foreign, snapshot
from .foreign import ForeignSpan
from .foreign_payload import payload_of
from .payload import PayloadFormat
from .scope import Failure, Reward, Scope
from .sequences import SequenceFormat
from .shared import SharedParts
from .snapshot import Snapshot
from .streams import Found, StreamTokens, Tokens

if TYPE_CHECKING:
    from ..config import TraceConfig

_OPERATIONS: Mapping[Kind, str] = {
    "trajectory": "invoke_agent",
    "rollout": "invoke_agent",
    "llm": "chat",
    "tool": "execute_tool",
}
_BASES = {"input": semconv.INPUT_BASE, "output": semconv.OUTPUT_BASE}
_MAX_OPEN_BYTES = 4_096


class SpanEncoder:
    """Gives scopes their final form.

    Args:
        config: settings of this process.
        token_fields: field name -> what it holds.
        breathe: called now and then in the middle of long work.
    """

    def __init__(
        self, config: TraceConfig, token_fields: Mapping[str, str], breathe: Callable[[], object]
    ) -> None:
        self._config = config
        self._breathe = breathe
        self._payload = PayloadFormat(config, token_fields, breathe)
        self._sequences = SequenceFormat(config, breathe)

    def encode(self, scope: Scope) -> bytes:
        """Encode a scope that has ended.

        A part that cannot be encoded is left out and named in ``trackway.notes``; the rest is kept.
        """
        try:
            encoded = self._encode(scope, self._payloads)
        except Exception as error:
            self._parts(scope).forget_new()
            scope.recorder.trouble("could not encode a span, of which little is kept", error)
            return self._least(scope, error)
        rollout = scope.rollout
        self._parts(scope).keep()
        whole = scope.parent is None and scope.kind in ("trajectory", "rollout") and scope.status == "ok"
        if whole and not rollout.generates and not rollout.sequence:
            scope.recorder.warn_once(
                "no generation",
                f"rollout {rollout.key or rollout.trace_id} ended without a call of a function decorated "
                "with @llm_trace: its generations are not recorded one by one",
            )
        return encoded

    def encode_open(self, scope: Scope, expired: str | None = None) -> bytes:
        """Encode a scope that has not ended: what is known of it so far, long arguments left out.

        Args:
            scope: the open scope.
            expired: why it is not waited for any more.
        """
        facts = {} if expired is None else {semconv.EXPIRED: expired}
        return self._encode(scope, self._short_arguments, facts)

    def _encode(
        self,
        scope: Scope,
        payloads: Callable[[Scope, dict[str, Any]], object],
        facts: Mapping[str, Any] = MappingProxyType({}),
    ) -> bytes:
        attributes = {semconv.KIND: scope.kind, **scope.rollout.tags, **(scope.extra or {}), **facts}
        if scope.policy_version is not None:
            attributes[semconv.POLICY_VERSION] = scope.policy_version
        notes = attributes[semconv.NOTES] = list(attributes.get(semconv.NOTES, ()))
        for part in (self._identity, payloads, self._root):
            try:
                part(scope, attributes)
            except Exception as error:
                self._parts(scope).forget_new()
                name = part.__name__.strip("_")
                scope.recorder.trouble(f"could not encode the {name} of a span", error)
                notes.append(snapshot.clean(f"{name} lost: {type(error).__name__}: {error}"))
        if scope.parent is None and scope.rollout.dropped:
            notes.append(f"{scope.rollout.dropped} spans of this rollout were dropped: the queue was full")
        if not notes:
            del attributes[semconv.NOTES]
        span = self._span(scope, attributes)
        try:
            return orjson.dumps(span)
        except TypeError:  # an odd text that other instrumentation, or a caller, put into a name
            return cast(bytes, snapshot.take(span, self._config.max_array_items))

    def _least(self, scope: Scope, error: Exception) -> bytes:
        """Encode that a scope was there and how it ended: without it a rollout would seem to run for ever."""
        why = f"everything else lost: {type(error).__name__}: {snapshot.message(error)}"
        attributes = {
            semconv.KIND: scope.kind,
            **scope.rollout.tags,
            semconv.STATUS: scope.status,
            semconv.NOTES: [snapshot.clean(why)],
        }
        code = {"ok": otlp.OK, "error": otlp.ERROR}.get(scope.status, otlp.UNSET)
        return orjson.dumps({**self._place(scope, attributes), "status": {"code": code}})

    def _place(self, scope: Scope, attributes: Mapping[str, Any]) -> dict[str, Any]:
        parent_id = scope.parent_id
        if self._config.capture_otel and parent_id is not None:
            parent_id = foreign.around(scope) or parent_id
        return {
            "traceId": f"{scope.trace_id:032x}",
            "spanId": f"{scope.span_id:016x}",
            "parentSpanId": "" if parent_id is None else f"{parent_id:016x}",
            "name": self._payload.text(scope.name),
            "kind": 1 + otlp.SIDES.index(_side(scope)),
            "startTimeUnixNano": str(scope.start_ns),
            "endTimeUnixNano": str(scope.end_ns or 0),
            "attributes": otlp.encode_attributes(attributes),
        }

    def _span(self, scope: Scope, attributes: dict[str, Any]) -> dict[str, Any]:
        code = otlp.UNSET
        description = ""
        events = [
            _event(name, time_ns, self._attributes(facts))
            for name, time_ns, facts in list(scope.events or ())
        ]
        if scope.failure is not None:
            code = otlp.ERROR
            description = f"{scope.failure.type}: {self._payload.text(scope.failure.message)}"
            events.append(_event(semconv.EXCEPTION_EVENT, scope.end_ns, self._exception(scope.failure)))
        elif isinstance(scope, ForeignSpan):
            code, description = scope.code, self._payload.text(scope.description or "")
        elif scope.status == "ok":
            code = otlp.OK
        if scope.rewards:
            events.extend(self._rewards(scope.rewards))
        attributes[semconv.STATUS] = scope.status
        # What other instrumentation put on the span stays, but cannot replace what we know.
        others = self._attributes(dict(scope.attributes or {}))
        if isinstance(scope, ForeignSpan):
            others = {**payload_of(scope.kind, others), **others}
        encoded = self._place(scope, {**others, **attributes})
        encoded["status"] = {"code": code, "message": description} if description else {"code": code}
        if events:
            encoded["events"] = events
        if scope.links:
            encoded["links"] = [
                {
                    "traceId": f"{trace_id:032x}",
                    "spanId": f"{span_id:016x}",
                    "attributes": otlp.encode_attributes(self._attributes(facts)),
                }
                for trace_id, span_id, facts in list(scope.links)
            ]
        return encoded

    def _attributes(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return {key: self._payload.attribute(key, value) for key, value in given.items()}

    def _identity(self, scope: Scope, attributes: dict[str, Any]) -> None:
        if isinstance(scope, ForeignSpan):
            return  # its own instrumentation has said what it is
        attributes[semconv.OPERATION] = _OPERATIONS.get(scope.kind, scope.kind)
        name = self._payload.text(scope.name)
        if scope.kind == "tool":
            attributes[semconv.TOOL_NAME] = name
        elif scope.kind in ("rollout", "trajectory"):
            attributes[semconv.AGENT_NAME] = name

    def _short_arguments(self, scope: Scope, attributes: dict[str, Any]) -> None:
        # Hundreds of rollouts may be open at once, and each of these is written again when it ends.
        if isinstance(scope.inputs, bytes) and len(scope.inputs) > _MAX_OPEN_BYTES:
            note = f"{len(scope.inputs):,} bytes of arguments are recorded when the call ends"
            attributes.setdefault(semconv.NOTES, []).append(note)
        else:
            self._arguments(scope, attributes, SharedParts())

    def _arguments(self, scope: Scope, attributes: dict[str, Any], parts: SharedParts) -> Tokens:
        found = Found(scope.given)
        if scope.prompt is not None:
            found.tokens["prompt"] = scope.prompt
        if scope.inputs is not None:
            name = semconv.TOOL_ARGUMENTS if scope.kind == "tool" else semconv.INPUT
            self._shared(scope, scope.inputs, found, parts, name, "input", attributes)
            _note_several(found, "arguments", attributes)
        return found.tokens

    @staticmethod
    def _parts(scope: Scope) -> SharedParts:
        if scope.rollout.parts is None:
            scope.rollout.parts = SharedParts()
        return scope.rollout.parts

    def _shared(
        self,
        scope: Scope,
        value: Snapshot,
        found: Found,
        parts: SharedParts,
        name: str,
        which: str,
        attributes: dict[str, Any],
    ) -> None:
        text, bases = self._payload.shared_json(value, found, parts, f"{scope.span_id:016x}", which)
        attributes[name] = text
        if bases:
            attributes[_BASES[which]] = orjson.dumps(bases).decode()

    def _payloads(self, scope: Scope, attributes: dict[str, Any]) -> None:
        parts = self._parts(scope)
        given = self._arguments(scope, attributes, parts)
        found = Found(scope.made)
        made = found.tokens
        name = semconv.TOOL_RESULT if scope.kind == "tool" else semconv.OUTPUT
        if scope.items is not None:
            attributes[name] = self._items(scope, found)
        elif isinstance(scope.output, str) and scope.kind == "tool":
            attributes[name] = self._payload.text(scope.output)
        elif scope.kind == "tool" and scope.output is not None:
            attributes[name] = self._payload.json(scope.output, found)
        elif scope.output is not None:
            self._shared(scope, scope.output, found, parts, name, "output", attributes)
        _note_several(found, "result", attributes)
        for what in given.keys() & made.keys():
            if given[what] != made[what]:
                note = f"{what} ids of the result are kept, and not the others in the arguments"
                attributes[semconv.NOTES].append(note)
        if given or made:
            self._sequences.put(scope, {**given, **made}, attributes)
        if scope.kind == "llm" and semconv.INPUT_TOKENS not in attributes:
            attributes.update(_reported_usage(scope.output))

    def _items(self, scope: Scope, made: Found) -> str:
        """Give the items of a generator as JSON; ``made`` receives the token sequences inside of them."""
        items: list[Any] = []
        stream = StreamTokens()
        for item in scope.items or ():
            found = Found(made.tokens)
            items.append(self._payload.value(item, found))
            stream.add({what: part for what, part in found.tokens.items() if what not in made.tokens})
            made.several |= found.several
        if scope.output is not None:
            items.append(self._payload.value(scope.output, made))
        made.tokens.update(stream.whole())
        return orjson.dumps(items).decode()

    def _root(self, scope: Scope, attributes: dict[str, Any]) -> None:
        for name, value in list((scope.annotations or {}).items()):
            attributes[semconv.ANNOTATION_PREFIX + snapshot.clean(name)] = self._payload.field(name, value)
        rollout = scope.rollout
        if scope.parent is None or rollout.experiment != self._config.experiment:
            # A reader needs it before the root has ended; else it is that of the process, on every line.
            attributes[semconv.EXPERIMENT] = rollout.experiment
        if scope.parent is not None:
            return
        attributes[semconv.PROJECT] = rollout.project
        if rollout.run_id:
            attributes[semconv.RUN_ID] = rollout.run_id
        if rollout.run:
            attributes[semconv.RUN] = rollout.run

    def _rewards(self, rewards: Iterable[Reward]) -> list[dict[str, Any]]:
        events = []
        for name, value, explanation, time_ns in list(rewards):
            field = semconv.EVALUATION_LABEL if isinstance(value, str) else semconv.EVALUATION_VALUE
            facts: dict[str, Any] = {
                semconv.EVALUATION_NAME: snapshot.clean(name),
                field: self._payload.text(value) if isinstance(value, str) else value,
            }
            if explanation is not None:
                facts[semconv.EVALUATION_EXPLANATION] = self._payload.text(explanation)
            events.append(_event(semconv.EVALUATION_EVENT, time_ns, facts))
        return events

    def _exception(self, failure: Failure) -> dict[str, Any]:
        return {
            semconv.EXCEPTION_TYPE: failure.type,
            semconv.EXCEPTION_MESSAGE: self._payload.text(failure.message),
            semconv.EXCEPTION_STACKTRACE: self._payload.text(failure.stacktrace()),
        }


def _side(scope: Scope) -> Side:
    if isinstance(scope, ForeignSpan):
        return scope.side
    return "client" if scope.kind == "llm" else "internal"


def _reported_usage(output: Any) -> dict[str, int]:
    """Read the token counts in the result of an OpenAI-like or Anthropic-like call."""
    if not isinstance(output, bytes) or b'"usage"' not in output:
        return {}
    result = orjson.loads(output)
    usage = result.get("usage") if isinstance(result, dict) else None
    if not isinstance(usage, dict):
        return {}
    given = usage.get("prompt_tokens", usage.get("input_tokens"))
    made = usage.get("completion_tokens", usage.get("output_tokens", 0))
    if not isinstance(given, int) or not isinstance(made, int):
        return {}
    return {semconv.INPUT_TOKENS: given, semconv.OUTPUT_TOKENS: made}


def _event(name: str, time_ns: int | None, attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "timeUnixNano": str(time_ns or 0),
        "name": name,
        "attributes": otlp.encode_attributes(attributes),
    }


def _note_several(found: Found, where: str, attributes: dict[str, Any]) -> None:
    for what in sorted(found.several & {"prompt", "response"}):
        attributes[semconv.NOTES].append(
            f"ids of more than one {what} in the {where}: all are kept there, and none as the turn's"
        )
