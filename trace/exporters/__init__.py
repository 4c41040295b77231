"""From the journal to the places where people look: each destination is an OpenTelemetry ``SpanExporter``."""

from __future__ import annotations

import importlib
import inspect
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..config import ConfigError, TraceConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

GROUP = "trackway.exporters"
_PACKAGES = {"mlflow": "mlflow", "otlp": "opentelemetry.exporter.otlp.proto.http", "weave": "weave"}
"""Backends of our own, whose extras have the same names -> what they import."""


def check(backend: str) -> None:
    """Say at once when a backend's package is missing, without importing it.

    Raises:
        ConfigError: it is; the message says what to install.
    """
    package = _PACKAGES.get(backend)
    if package is not None and not _is_installed(package):
        raise ConfigError(
            f"backend={backend!r} needs the package {package!r}, which is not installed: "
            f"pip install 'trackway[{backend}]'"
        )
    if backend == "otlp":
        from .otlp_transport import protocol

        protocol()


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # nor is the one around it
        return False


def preload(backend: str) -> None:
    """Import what a backend of our own needs, before a thread does.

    Where two threads import parts of one large package at once, Python may fail in either of them.
    """
    if backend in _PACKAGES:
        importlib.import_module(_PACKAGES[backend])


def announce(backend: str, config: TraceConfig) -> None:
    """Log where a backend of our own keeps what it is sent, with every path absolute; once in a process.

    Of one that wants a login, log where there is none.
    """
    if backend == "mlflow":
        from .mlflow_store import tracking_uri

        tracking_uri(config.store, config.tracking_uri)
    elif backend == "weave":
        from .weave_client import warn_without_login

        warn_without_login()


def build(backend: str, config: TraceConfig) -> SpanExporter:
    """Make the exporter that an entry point names; one that takes a ``config`` argument is given it.

    Raises:
        ConfigError: no entry point has that name, or its package is missing.
    """
    check(backend)
    for point in entry_points(group=GROUP, name=backend):
        factory = point.load()
        takes_config = "config" in inspect.signature(factory).parameters
        exporter: SpanExporter = factory(config=config) if takes_config else factory()
        return exporter
    raise ConfigError(f"no exporter is registered as {backend!r} in the entry-point group {GROUP}")
