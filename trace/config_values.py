"""What each setting may hold, and the errors that say so."""

from __future__ import annotations

import difflib
import math
import operator
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


class ConfigError(ValueError):
    """A setting is unknown or wrong: the message names the key as written, its value, what is allowed."""


def exporter_names() -> tuple[str, ...]:
    """Names that ``backend`` may hold: the entry points of the group ``trackway.exporters``, sorted."""
    from importlib.metadata import entry_points

    return tuple(sorted({point.name for point in entry_points(group="trackway.exporters")}))


def check(name: str, written: str, value: Any) -> Any:
    """Give a value as the field ``name`` of ``TraceConfig`` holds it.

    Text is read as what the field needs, since variables and command lines hold nothing else.

    Args:
        written: the key as the user wrote it, for the message.

    Raises:
        ConfigError: the value is not allowed.
    """
    if isinstance(value, str) and value == "???":
        raise ConfigError(f"{written} has no value: '???' marks one that must be given")
    if isinstance(value, str) and "${" in value:
        raise ConfigError(
            f"{written}={show(value)} is an interpolation that nothing has resolved; "
            "hand over the OmegaConf object in place of its text, or write the value"
        )
    try:
        if isinstance(value, str) and not value.isascii():
            _whole_characters(value)
        return _CHECKS[name](value)
    except ValueError as error:
        raise wrong(written, value, str(error)) from None


def unknown(written: str, name: str, names: Collection[str]) -> ConfigError:
    """Make the error for a key that nobody knows; ``names`` are those that would be known."""
    return ConfigError(
        f"{written}: there is no such setting{nearest(name, names) or '.'} Settings: {', '.join(names)}."
    )


def wrong(written: str, value: Any, expected: str) -> ConfigError:
    """Make the error for a value that is not allowed."""
    return ConfigError(f"{written}={show(value)} is not allowed; expected {expected}")


def show(value: Any) -> str:
    """Give the value for a message; of an object only its type, since its repr may be secret or raise."""
    if isinstance(value, (list, tuple)):
        inner = (
            f"<{type(item).__name__}>" if isinstance(item, (list, tuple)) else show(item) for item in value
        )
        text = f"[{', '.join(inner)}]"
    elif (
        value is None
        or isinstance(value, (bool, float, str))
        or (isinstance(value, int) and abs(value) < 2**64)
    ):
        text = repr(value)
        if "://" in text:  # the password of a database
            text = re.sub(r"(?<=://)([^/\s:@]*):[^/\s@]+@", r"\1:***@", text)
    else:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 120 else f"{text[:117]}..."


def load_yaml(text: str) -> Any:
    """Read YAML with the plain scalars of YAML 1.2.

    Those of YAML 1.1, which PyYAML follows, read ``off`` as false, ``010`` as 8 and ``1:30`` as 90.

    Raises:
        ValueError: it is not YAML.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.yaml_implicit_resolvers = {}
    for kind, pattern, first in (
        ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
        ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
        ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
        ("float", r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
        ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
        ("merge", r"<<", ["<"]),
    ):
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(rf"^(?:{pattern})$"), first)
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


@cache
def close(one: str, other: str) -> bool:
    """Say whether a name may be a slip for another one.

    The limit lets through every two keys of verl's configuration at places that we read.
    """
    matcher = difflib.SequenceMatcher(None, one.casefold(), other.casefold())
    return matcher.real_quick_ratio() >= 0.85 and matcher.ratio() >= 0.85


def nearest(name: str, names: Iterable[str]) -> str:
    known = {name.casefold(): name for name in names}
    match = difflib.get_close_matches(name.casefold(), known, 1)
    return f"; did you mean {known[match[0]]!r}?" if match else ""


# One check for each kind of value. Each gives the value back as the field holds it, or raises a
# ValueError whose text completes "expected …".


def _optional(check: Callable[[Any], Any], value: Any) -> Any:
    if value is None or (isinstance(value, str) and value.strip().lower() in ("none", "null")):
        return None
    try:
        return check(value)
    except ValueError as error:
        raise ValueError(f"{error}, or null") from None


def _whole_characters(value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("text that UTF-8 can hold, without bytes or halves of other encodings") from None


def _text(value: Any) -> str:
    # A name like 2024 comes out of YAML and Hydra as a number.
    if isinstance(value, (str, int, float)) and not isinstance(value, bool) and str(value).strip():
        return str(value).strip()
    raise ValueError("a text that is not empty (in quotes where YAML would read something else)")


_LEAST_BYTES = 4096
_NEED_HOST = ("http", "https", "postgresql", "mysql", "mssql")
_URI_SCHEMES = (*_NEED_HOST, "file", "sqlite", "databricks", "databricks-uc")


def _tracking_uri(value: Any) -> str:
    """Check a tracking URI, and make the path of a file absolute: whoever exports may run elsewhere."""
    expected = (
        "the address of an MLflow server (http://host:5000), a database (sqlite:////data/mlflow.db, "
        "postgresql://user@host/name), databricks, or a directory"
    )
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    uri = _text(value)
    scheme, colon, rest = uri.partition(":")
    scheme = scheme.lower()
    base = scheme.partition("+")[0]
    if not colon:
        if uri in ("databricks", "databricks-uc", "uc"):
            return uri
        return _path(uri).as_uri()
    if base == "sqlite":
        path, question, query = rest.partition("?")
        if not path.startswith("///") or path[3:] in ("", ":memory:") or "mode=memory" in query:
            hint = f"sqlite:///{rest.strip('/')}" if rest.strip("/") else "sqlite:////data/mlflow.db"
            raise ValueError(f"{expected}; a database in memory would be gone at once, write {hint}")
        path = path[3:]
        return uri if path.startswith("file:") else f"{scheme}:///{_path(path)}{question}{query}"
    if scheme == "file":
        if rest.startswith("//") and not rest.startswith("///"):
            raise ValueError(f"{expected}; a path follows on file:///")
        return uri if rest.startswith("/") else _path(rest).as_uri()
    if base not in _URI_SCHEMES and base not in _tracking_plugins():
        raise ValueError(f"{expected}{nearest(base, _URI_SCHEMES)}")
    if base in _NEED_HOST:
        try:
            parts = urlsplit(uri)
            well = rest.startswith("//") and bool(parts.hostname if base[:4] == "http" else parts.path)
            well = well and (parts.port is None or parts.port > 0) and not re.search(r"\s", uri)
        except ValueError:
            well = False
        if not well:
            raise ValueError(expected)
    return uri


def _tracking_plugins() -> set[str]:
    from importlib.metadata import entry_points

    return {point.name for point in entry_points(group="mlflow.tracking_store")}


def _path(value: Any) -> Path:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not value.strip():
        raise ValueError("the path of a directory")
    try:
        return Path(value).expanduser().absolute()
    except RuntimeError as error:  # ~name of nobody
        raise ValueError(f"the path of a directory ({error})") from None


def _tokenizer(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, (bool, int, float, bytes, list, tuple, dict)) or value == "":
        raise ValueError("a tokenizer, or the path of one")
    return value


def _flag(value: Any) -> bool:
    text = str(value).strip().lower() if isinstance(value, (str, int)) else ""
    if text in ("true", "1", "yes", "on"):
        return True
    if text in ("false", "0", "no", "off"):
        return False
    raise ValueError("true or false")


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return int(value) if isinstance(value, str) else operator.index(value)


def _whole(low: int, value: Any) -> int:
    try:
        number = _integer(value)
        if number < low:
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(f"a whole number, at least {low}") from None
    return number


def _bytes(reason: str, value: Any) -> int:
    try:
        return _whole(_LEAST_BYTES, value)
    except ValueError:
        raise ValueError(f"a whole number of bytes, at least {_LEAST_BYTES:,}: {reason}") from None


def _number(low: float, high: float, value: Any) -> float:
    try:
        number = float(value)
        if isinstance(value, bool) or not low <= number <= high or math.isinf(number):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        wanted = f"from {low:g} to {high:g}" if high < math.inf else f"of at least {low:g}"
        raise ValueError(f"a number {wanted}") from None
    return number


def _choice(names: tuple[str, ...], value: Any) -> str:
    # YAML 1.1, which OmegaConf reads, takes a bare off for false.
    text = "off" if value is False else value.strip().lower() if isinstance(value, str) else ""
    if text in names:
        return text
    raise ValueError(f"one of {', '.join(names)}{nearest(text, names)}")


def _items(value: Any) -> list[Any]:
    """Give the items of a list, or of a text that has commas or YAML's brackets."""
    if isinstance(value, str) and value.strip().startswith("["):
        value = load_yaml(value)
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, Collection) or isinstance(value, (Mapping, bytes, bytearray)):
        raise ValueError
    return list(value)


def _names(value: Any) -> tuple[str, ...]:
    try:
        items = [item.strip() if isinstance(item, str) else "" for item in _items(value)]
        if not all(items):
            raise ValueError
    except ValueError:
        raise ValueError("a list of names") from None
    return tuple(dict.fromkeys(items))


def _samples(value: Any) -> tuple[int | str, ...]:
    try:
        items: list[Any] = [value] if isinstance(value, int) else _items(value)
        if isinstance(value, str) and not value.strip().startswith("["):
            # 17,ab from a variable or a command line, where nothing else can say that 17 is a number
            items = [int(text) if re.fullmatch(r"-?(0|[1-9][0-9]*)", text) else text for text in items]
        return tuple(dict.fromkeys(str(item) if isinstance(item, str) else _integer(item) for item in items))
    except (TypeError, ValueError):
        raise ValueError("a list of sample ids, each a whole number or a text") from None


def _backend(value: Any) -> tuple[str, ...]:
    allowed = {name.lower(): name for name in exporter_names()}
    expected = f"{', '.join(allowed.values())}, a list of these, or null for the journal only"
    if value is None or value is False:  # YAML 1.1 again: backend: off
        return ()
    try:
        items = _items(value)
        if items == [None]:
            return ()
        texts = [item.strip().lower() for item in items if isinstance(item, str)]
        if len(texts) < len(items):
            raise ValueError
    except ValueError:
        raise ValueError(expected) from None
    if texts in ([], [""], ["none"], ["null"], ["off"]):
        return ()
    for text in texts:
        if text not in allowed:
            raise ValueError(f"{expected}{nearest(text, allowed)}")
    return tuple(dict.fromkeys(allowed[text] for text in texts))


CRITERIA = ("errors", "truncated", "best", "worst", "varied")
"""Kinds of trajectories that ``export_only`` may name."""


def _criteria(value: Any) -> tuple[str, ...]:
    expected = f"a list of {', '.join(CRITERIA)}"
    try:
        names = _names(value)
    except ValueError:
        names = ()
    for name in names:
        if name not in CRITERIA:
            raise ValueError(f"{expected}{nearest(name, CRITERIA)}")
    if not names:
        raise ValueError(expected)
    return names


def _per_backend(check: Callable[[Any], Any], value: Any) -> Any:
    """Check one value for all backends, or a mapping that has one for each of some."""
    if isinstance(value, str) and value.strip().startswith("{"):
        value = load_yaml(value)
    if not isinstance(value, Mapping):
        try:
            return _optional(check, value)
        except ValueError as error:
            raise ValueError(f"{error}; or a mapping from backend to such a value") from None
    allowed = {name.lower(): name for name in exporter_names()}
    found = {}
    for key in value:
        name = str(key).strip().lower()
        if name not in allowed:
            raise ValueError(
                f"a mapping from backend to value, with the backends {', '.join(allowed.values())}; "
                f"{show(key)} is none{nearest(name, allowed)}"
            )
        try:
            one = _optional(check, value[key])
        except ValueError as error:
            raise ValueError(f"{error}, for {allowed[name]}; there it is {show(value[key])}") from None
        if one is not None:
            found[allowed[name]] = one
    return found or None


_count = partial(_whole, 0)
_positive = partial(_whole, 1)
_share = partial(_number, 0, 1)

_CHECKS: dict[str, Callable[[Any], Any]] = {
    "store": _path,
    "project": _text,
    "experiment": _text,
    "backend": _backend,
    "tracking_uri": partial(_optional, _tracking_uri),
    "run_id": partial(_optional, _text),
    "tokenizer": partial(_optional, _tokenizer),
    "token2text": _flag,
    "max_length": partial(_optional, _positive),
    "max_text_length": partial(_optional, _positive),
    "skip_special_tokens": _flag,
    "sync": partial(_choice, ("process", "inline", "off")),
    "max_samples_per_step_per_worker": partial(_optional, _count),
    "max_samples_per_step": partial(_optional, _count),
    "samples_per_step": partial(_optional, _positive),
    "ratio": _share,
    "log_frequency": _positive,
    "keep_samples": _samples,
    "val_max_samples_per_step_per_worker": partial(_optional, _count),
    "val_max_samples_per_step": partial(_optional, _count),
    "val_samples_per_step": partial(_optional, _positive),
    "val_ratio": partial(_optional, _share),
    "log_val_generations": partial(_whole, -1),
    "seed": _count,
    "export_only": partial(_per_backend, _criteria),
    "export_ratio": partial(_per_backend, _share),
    "max_bytes_per_step": partial(_per_backend, partial(_bytes, "a trajectory must fit in")),
    "prompt_fields": _names,
    "response_fields": _names,
    "mask_fields": _names,
    "logprob_fields": _names,
    "redact": _names,
    "max_array_items": _count,
    "max_queue_bytes": partial(_bytes, "a span must fit in"),
    "queue_policy": partial(_choice, ("drop", "block")),
    "queue_timeout": partial(_number, 0, math.inf),
    "max_open_spans": _positive,
    "open_timeout": partial(_optional, partial(_number, 0.1, math.inf)),
    "max_segment_bytes": partial(_bytes, "a line must fit in"),
    "capture_otel": _flag,
}
TEXTS = ("store", "project", "experiment", "tracking_uri", "run_id", "tokenizer", "sync", "queue_policy")
"""Fields whose value is the text as it was typed, also where it looks like a number."""
PER_BACKEND = ("export_only", "export_ratio", "max_bytes_per_step")
"""Fields whose value may be a mapping from backend to value."""
