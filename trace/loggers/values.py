"""What people log becomes plain numbers here: tensors, arrays, nested mappings."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2s
from typing import Any

from .base import Histogram

BINS = 64
_LARGEST = 2**63

Skip = Callable[[str, str], None]
"""Is told the name of a value that is left out, and why."""


def plain(metrics: Mapping[Any, Any], skip: Skip) -> tuple[dict[str, int | float], dict[str, Histogram]]:
    """Turn what was logged into numbers and histograms that nobody changes any more.

    Numbers, booleans, decimals, and arrays and tensors of one element become ``int`` or ``float``, of any
    device and type; larger arrays and tensors become histograms; a mapping inside becomes names joined by
    ``/``. Texts, None, lists and other objects are no metrics.

    Args:
        metrics: name -> value; the caller may change it afterwards.
        skip: see ``Skip``.

    Returns:
        The metrics and the histograms, each by name.
    """
    numbers_: dict[str, int | float] = {}
    histograms: dict[str, Histogram] = {}
    for key, value in metrics.items():
        # Nearly everything that trainers log is one of these two.
        if type(value) is float or (type(value) is int and -_LARGEST <= value < _LARGEST):
            name = key if type(key) is str else str(key)
            if name and name not in numbers_:
                numbers_[name] = value
                continue
        for name, item in _flat(str(key), value, skip):
            try:
                found: float | Histogram | None = number(item)
                if found is None:
                    found = _histogram(item)
            except Exception as error:  # an object of somebody else's may do anything
                skip(name, f"its {type(item).__name__} could not be read: {error}")
                continue
            if isinstance(found, Histogram):
                histograms[name if name not in histograms else _other(name)] = found
            elif found is not None:
                numbers_[name if name not in numbers_ else _other(name)] = found
            else:
                skip(name, f"{_article(item)} is not a number")
    return numbers_, histograms


def _flat(name: str, value: Any, skip: Skip) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        if name.strip():
            yield name, value
        else:
            skip(name, "a metric needs a name")
        return
    # A mapping may hold itself; no metrics are nested this deep.
    stack = [(name, value, 0)]
    while stack:
        above, mapping, depth = stack.pop()
        for key, item in mapping.items():
            inner = f"{above}/{key}" if above else str(key)
            if isinstance(item, Mapping):
                if depth < 20:
                    stack.append((inner, item, depth + 1))
                else:
                    skip(inner, "it is nested too deep")
            else:
                yield from _flat(inner if str(key).strip() else "", item, skip)


def _other(name: str) -> str:
    """Tell apart ``{"h/x": 1}`` and ``{"h": {"x": 2}}`` of one call."""
    return f"{name}~nested"


def number(value: Any) -> int | float | None:
    """Give a value as ``int`` or ``float``; None when it is no single number."""
    if isinstance(value, (str, bytes, bytearray)) or value is None:
        return None
    if isinstance(value, (bool, int)):
        return int(value) if -_LARGEST <= value < _LARGEST else _as_float(value)
    if isinstance(value, numbers.Real):  # also numpy's scalars and fractions
        return int(value) if isinstance(value, numbers.Integral) else _as_float(value)
    if hasattr(value, "as_tuple") and hasattr(value, "is_finite"):  # Decimal, of either implementation
        return _as_float(value) if not value.is_snan() else math.nan
    if _is_tensor(value) or _is_array(value):
        size = value.numel() if _is_tensor(value) else value.size
        return number(value.item()) if size == 1 else None
    return None


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _histogram(value: Any) -> Histogram | None:
    if _is_tensor(value):
        value = value.detach().float().cpu().numpy()
    elif not _is_array(value):
        return None
    import numpy

    if value.size < 2 or value.dtype.kind not in "biuf":
        return None
    values = value.astype(numpy.float64, copy=False).ravel()
    finite = values[numpy.isfinite(values)]
    if not finite.size:
        return None
    counts, edges = numpy.histogram(finite, bins=BINS)
    return Histogram(
        edges=tuple(edges.tolist()),
        counts=tuple(counts.tolist()),
        total=float(finite.sum()),
        squares=float((finite * finite).sum()),
    )


def _article(value: Any) -> str:
    if value is None:
        return "None"
    kind = type(value).__name__
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Give those of the metrics that are neither infinite nor NaN."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


class Names:
    """Gives each name another one that a destination takes, always the same, and no two the same.

    The first that needs a name has it; another that would get it too has a few letters of its own added,
    made of the original. Names that need no change come first among those of one call.

    Args:
        rule: makes an allowed name of any; two may fall together.
        longest: most characters of a name.
        known: original -> given, from an earlier life of the run.
    """

    def __init__(self, rule: Callable[[str], str], longest: int, known: Mapping[str, str] = {}) -> None:
        self._rule = rule
        self._longest = longest
        self._given = dict(known)
        self._taken = {given.casefold(): name for name, given in known.items()}

    @property
    def changed(self) -> dict[str, str]:
        """Those that have another name there, by their own."""
        return {name: given for name, given in self._given.items() if name != given}

    def map(self, names: Mapping[str, Any]) -> dict[str, Any]:
        """Give the mapping with its names changed; the values are the same."""
        new = [name for name in names if name not in self._given]
        for name in sorted(new, key=lambda name: self._rule(name) != name):
            self._add(name)
        return {self._given[name]: value for name, value in names.items()}

    def _add(self, name: str) -> None:
        given = self._rule(name)
        if len(given) > self._longest or self._taken.get(given.casefold(), name) != name:
            mark = "-" + blake2s(name.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
            given = given[: self._longest - len(mark)] + mark
        self._given[name] = given
        self._taken[given.casefold()] = name
