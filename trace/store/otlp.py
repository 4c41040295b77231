"""Spans as OTLP JSON, one ``TracesData`` object per line, and back.

The format is that of the OpenTelemetry file exporter: 64-bit integers are strings, ids are hexadecimal,
bytes are base64, NaN and infinities are the strings that proto3's JSON mapping gives them.
Source: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from ..model import Side

SCOPE = {"name": "trackway"}
UNSET, OK, ERROR = 0, 1, 2
"""OTLP's status codes."""
SIDES: tuple[Side, ...] = ("internal", "server", "client", "producer", "consumer")
"""OTLP's kinds of spans, the first of which is 1."""

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode_value(value: Any) -> dict[str, Any]:
    """Give a value as an OTLP ``AnyValue``."""
    kind = type(value)
    if kind is str:
        return {"stringValue": value}
    if kind is bool:
        return {"boolValue": value}
    if kind is int:
        return {"intValue": str(value)} if -(2**63) <= value < 2**63 else {"stringValue": str(value)}
    if kind is float:
        return {"doubleValue": value if math.isfinite(value) else _name_of(value)}
    if kind is bytes:
        return {"bytesValue": base64.b64encode(value).decode()}
    if kind is list or kind is tuple:
        return {"arrayValue": {"values": [encode_value(item) for item in value]}}
    if kind is dict:
        return {"kvlistValue": {"values": encode_attributes(value)}}
    return {} if value is None else {"stringValue": str(value)}


def _name_of(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def encode_attributes(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Give attributes as OTLP ``KeyValue`` items."""
    return [{"key": key, "value": encode_value(value)} for key, value in attributes.items()]


def decode_value(value: Mapping[str, Any]) -> Any:
    """Read an OTLP ``AnyValue``."""
    for kind, content in value.items():
        if kind in ("stringValue", "boolValue"):
            return content
        if kind == "intValue":
            return int(content)
        if kind == "doubleValue":
            return _NOT_FINITE.get(content) if isinstance(content, str) else float(content)
        if kind == "bytesValue":
            return base64.b64decode(content)
        if kind == "arrayValue":
            return [decode_value(item) for item in content.get("values", ())]
        if kind == "kvlistValue":
            return decode_attributes(content.get("values", ()))
    return None


def decode_attributes(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Read OTLP ``KeyValue`` items."""
    return {item["key"]: decode_value(item.get("value") or {}) for item in items}


class LineEncoder:
    """Makes journal lines for spans that share one resource.

    Args:
        resource: attributes of the process and the run, repeated on every line.
    """

    def __init__(self, resource: Mapping[str, Any]) -> None:
        described = orjson.dumps({"attributes": encode_attributes(resource)})
        self._head = (
            b'{"resourceSpans":[{"resource":'
            + described
            + b',"scopeSpans":[{"scope":'
            + orjson.dumps(SCOPE)
            + b',"spans":['
        )

    def line(self, spans: Sequence[bytes]) -> bytes:
        """Give one line, its newline included, for encoded spans of one trajectory."""
        return self._head + b",".join(spans) + b"]}]}]}\n"


def spans_of(line: bytes | str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Give the spans of a line as they stand there, each with its resource's attributes.

    Raises:
        ValueError: the line is not a ``TracesData`` object.
    """
    data = orjson.loads(line)
    try:
        for resource_spans in data["resourceSpans"]:
            resource = decode_attributes(resource_spans.get("resource", {}).get("attributes", ()))
            for scope_spans in resource_spans.get("scopeSpans", ()):
                for span in scope_spans.get("spans", ()):
                    yield span, resource
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not an OTLP TracesData object: {error!r}") from None
