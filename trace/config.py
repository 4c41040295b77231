"""The settings of a process that records, and the places they come from."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from .config_values import (
    PER_BACKEND,
    TEXTS,
    ConfigError,
    check,
    close,
    exporter_names,
    load_yaml,
    show,
    unknown,
    wrong,
)

__all__ = ["ConfigError", "TraceConfig", "exporter_names", "from_dict", "load_config", "to_dict", "value_for"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """All settings, checked. ``load_config`` makes one; this constructor checks nothing.

    Attributes:
        store: directory of the journal, absolute. Default ``./trackway-store``.
        project: name of the project. Default ``trackway``.
        experiment: name of the experiment. Default ``default``.
        backend: exporters to run, names of ``exporter_names()``. Default none: the journal only.
        tracking_uri: MLflow server, database or directory; a relative path counts from the directory that
            is current when the settings are read. Default None: ``mlflow.db`` inside the store.
        run_id: MLflow run to link trajectories to. Default None.
        tokenizer: a Hugging Face tokenizer or processor, or the path of one. Default None.
        token2text: whether token ids are decoded to text. Default False.
        max_length: most tokens of one sequence that become text; None is no limit. Default 4096.
        max_text_length: most characters kept of a text that never was tokens; None is no limit.
            Default 100,000.
        skip_special_tokens: whether special tokens are left out of the text. Default False.
        sync: who exports: a separate ``process``, this process (``inline``), or nobody (``off``).
            Default ``process``.
        max_samples_per_step_per_worker: most distinct samples that one process records of a step, with
            all their rollouts; 0 records none, None is no limit. Default None.
        max_samples_per_step: samples recorded of a step by all processes together: the expected number
            when ``samples_per_step`` is known, else the most of each process. Default None: no limit.
        samples_per_step: distinct samples in one step's batch (verl: ``data.train_batch_size``).
            Default None: not known.
        ratio: share of the samples to record, 0 to 1. Default 1.
        log_frequency: record the training steps that this number divides. Default 1: every step.
        keep_samples: ids of samples that are always recorded, whatever the other settings say; ``17``
            and ``"17"`` are two samples. Default none.
        val_max_samples_per_step_per_worker: the same for validation. Default None: validation has a
            budget of its own of ``max_samples_per_step_per_worker`` samples, as in verl.
        val_max_samples_per_step: the same for validation. Default None: no limit.
        val_samples_per_step: the same for validation (verl: ``data.val_batch_size``). Default None.
        val_ratio: the same for validation. Default None: all.
        log_val_generations: validation samples to show in a logger's table; -1 is all. Default 0.
        seed: seed of every choice among samples. Default 0.
        export_only: what destinations get of a step, kinds of trajectories: ``errors`` (that failed or died),
            ``truncated`` (of which a generation came to its length limit), ``best`` and ``worst`` (by the
            reward in each group), ``varied`` (groups whose rewards differ more than those of the average
            one, whole). One list for all, or a mapping from backend to list. Default None: everything.
        export_ratio: share of the samples, 0 to 1, that destinations get of a step besides; alone, only
            these. For all, or a mapping. Default None: none besides.
        max_bytes_per_step: most bytes that a destination gets of one step, at least 4,096. For all, or a
            mapping. Default None: no limit.
        prompt_fields: names of fields that hold the token ids of a prompt.
        response_fields: names of fields that hold the token ids of a response. Defaults: ``response_ids``,
            ``token_ids`` (verl, vLLM), ``completion_ids`` (TRL), ``output_ids`` and ``output_token_ids``
            (SGLang), ``generation_token_ids`` (NeMo).
        mask_fields: names of fields that hold a response's mask.
        logprob_fields: names of fields that hold the log probabilities of a response's tokens.
        redact: further names of keys whose values are secrets. Default none.
        max_array_items: longest array kept item by item. Default 10,000 items.
        max_queue_bytes: memory for spans that wait to be written, at least 4,096. Default 512 MiB.
        queue_policy: what happens to a span when that memory is full: ``drop`` it, or ``block`` the
            caller until there is room. Once a caller has waited for ``queue_timeout`` in vain, spans are
            dropped without waiting until there is room again. Default ``block``.
        queue_timeout: in seconds. Default 1.
        max_open_spans: most spans that are remembered as open; the oldest one above is given up as
            expired, and still recorded when it ends after all. Default 100,000.
        open_timeout: seconds after which an open span is given up likewise, at least 0.1.
            Default None: never.
        max_segment_bytes: size at which a new journal file is begun, at least 4,096. Default 64 MiB.
        capture_otel: whether spans that other OpenTelemetry instrumentation makes inside of a rollout are
            recorded with it. Default False.
    """

    store: Path = field(default_factory=lambda: Path("trackway-store").absolute())
    project: str = "trackway"
    experiment: str = "default"
    backend: tuple[str, ...] = ()
    tracking_uri: str | None = None
    run_id: str | None = None
    tokenizer: Any = None
    token2text: bool = False
    max_length: int | None = 4096
    max_text_length: int | None = 100_000
    skip_special_tokens: bool = False
    sync: Literal["process", "inline", "off"] = "process"
    max_samples_per_step_per_worker: int | None = None
    max_samples_per_step: int | None = None
    samples_per_step: int | None = None
    ratio: float = 1.0
    log_frequency: int = 1
    keep_samples: tuple[int | str, ...] = ()
    val_max_samples_per_step_per_worker: int | None = None
    val_max_samples_per_step: int | None = None
    val_samples_per_step: int | None = None
    val_ratio: float | None = None
    log_val_generations: int = 0
    seed: int = 0
    export_only: tuple[str, ...] | Mapping[str, tuple[str, ...]] | None = None
    export_ratio: float | Mapping[str, float] | None = None
    max_bytes_per_step: int | Mapping[str, int] | None = None
    prompt_fields: tuple[str, ...] = ("prompt_ids", "prompt_token_ids", "input_ids")
    response_fields: tuple[str, ...] = (
        "response_ids",
        "token_ids",
        "completion_ids",
        "output_ids",
        "output_token_ids",
        "generation_token_ids",
    )
    mask_fields: tuple[str, ...] = ("response_mask",)
    logprob_fields: tuple[str, ...] = ("response_logprobs", "log_probs", "logprobs", "generation_log_probs")
    redact: tuple[str, ...] = ()
    max_array_items: int = 10_000
    max_queue_bytes: int = 512 * 2**20
    queue_policy: Literal["drop", "block"] = "block"
    queue_timeout: float = 1.0
    max_open_spans: int = 100_000
    open_timeout: float | None = None
    max_segment_bytes: int = 64 * 2**20
    capture_otel: bool = False


def value_for(backend: str, value: Mapping[str, T] | T | None) -> T | None:
    """Give what a setting that may be a mapping says for one backend."""
    return value.get(backend) if isinstance(value, Mapping) else value


_SYNONYMS = {"project_name": "project", "experiment_name": "experiment"}
_NAMES = {f.name: f.name for f in fields(TraceConfig)} | _SYNONYMS
"""Every name a setting may be written with -> its field."""

_SECTIONS = ("actor_rollout_ref", "trainer", "data")
"""Top-level keys by which verl's tree is recognised."""
_TRACE = "actor_rollout_ref.rollout.trace"
_VERL = {
    "trainer.project_name": "project",
    "trainer.experiment_name": "experiment",
    "trainer.log_val_generations": "log_val_generations",
    "trainer.log_frequency": "log_frequency",
    "data.train_batch_size": "samples_per_step",
    "data.val_batch_size": "val_samples_per_step",
}
"""Keys of verl's tree that mean a setting of ours, besides those under ``_TRACE``."""
_HYDRA_GROUPS = (*_SECTIONS, "model_engine")
"""Keys without a dot that choose among verl's config files on its command line."""

_ENVIRON = {"MLFLOW_TRACKING_URI": "tracking_uri", "MLFLOW_RUN_ID": "run_id"}
_NOT_SETTINGS = (
    "TRACKWAY_STRICT",
    "TRACKWAY_VERL",
    "TRACKWAY_VERL_TRACKING",
    "TRACKWAY_DEMO_MODEL",
    "TRACKWAY_WEBHOOK_URL",
    "TRACKWAY_WEBHOOK_HEADERS",
    "TRACKWAY_EMAIL_PASSWORD",
)
"""Variables of ours that steer something else."""

_Settings = dict[str, tuple[str, Any]]
"""Field -> the key as it was written, and the value."""


def load_config(
    config: Any = None, *, environ: Mapping[str, str] | None = None, **settings: Any
) -> TraceConfig:
    """Collect the settings from everywhere; what comes first here wins.

    1. ``settings``, under the names of ``TraceConfig`` (or ``project_name``, ``experiment_name``);
    2. ``config``;
    3. variables: ``TRACKWAY_`` and the field's name in capitals, then ``MLFLOW_TRACKING_URI`` and
       ``MLFLOW_RUN_ID``; an empty one counts as not set;
    4. the defaults.

    Args:
        config: a mapping, an OmegaConf object, the path of a YAML file, or the list of arguments of a
            command line (``key=value``, also with Hydra's prefixes). A top-level key
            ``actor_rollout_ref``, ``trainer`` or ``data`` says that it is verl's tree. Of that, these
            are read, and null means not set: every key of ``actor_rollout_ref.rollout.trace``;
            ``project_name``, ``experiment_name``, ``log_val_generations`` and ``log_frequency`` of
            ``trainer``, which give way to the former; ``train_batch_size`` and ``val_batch_size`` of
            ``data``. Settings without a section may stand beside them. On a command line, other keys
            with a dot belong to somebody else.
        environ: in place of ``os.environ``.

    Raises:
        ConfigError: a key is unknown, a value wrong, or ``config`` cannot be read.
    """
    found = _read_environ(os.environ if environ is None else environ)
    found |= _read(config)
    found |= _named((name, name, value) for name, value in settings.items())
    return _build(found)


def to_dict(config: TraceConfig) -> dict[str, Any]:
    """Make plain JSON of the settings, for another process; a tokenizer that is an object stays behind."""
    out: dict[str, Any] = {}
    for f in fields(TraceConfig):
        value = getattr(config, f.name)
        if isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, os.PathLike):
            value = os.fspath(value)
        if f.name != "tokenizer" or isinstance(value, str):
            out[f.name] = value
    return out


def from_dict(data: Mapping[str, Any]) -> TraceConfig:
    """Read what ``to_dict`` made; variables are not looked at.

    Raises:
        ConfigError: a key is unknown or a value wrong.
    """
    return _build(_named((name, name, value) for name, value in data.items()))


def _build(found: _Settings) -> TraceConfig:
    return TraceConfig(**{name: check(name, written, value) for name, (written, value) in found.items()})


def _read(config: Any) -> _Settings:
    if config is None:
        return {}
    if isinstance(config, (str, os.PathLike)):
        return _read_tree(_read_file(Path(config)))
    if isinstance(config, Mapping):
        return _read_tree(config)
    if isinstance(config, Sequence) and not isinstance(config, (bytes, bytearray)):
        return _read_arguments(_listed(config, "config"))
    raise ConfigError(
        f"config is a {type(config).__name__}; expected a mapping, an OmegaConf object, the path of a "
        "YAML file, or a list of key=value arguments"
    )


def _named(items: Iterable[tuple[str, Any, Any]]) -> _Settings:
    """Sort (key as written, name, value) by field."""
    found: _Settings = {}
    for written, name, value in items:
        if name not in _NAMES:
            raise unknown(f"{written}={show(value)}", str(name), _NAMES)
        field_name = _NAMES[name]
        if field_name in found:
            raise ConfigError(
                f"{written} and {found[field_name][0]} are the same setting; give one of the two"
            )
        found[field_name] = (written, value)
    return found


def _read_environ(environ: Mapping[str, str]) -> _Settings:
    found = {name: (key, environ[key]) for key, name in _ENVIRON.items() if environ.get(key)}
    names = {f"TRACKWAY_{name.upper()}": name for name in _NAMES}
    given = [key for key in environ if key.startswith("TRACKWAY_") and key not in _NOT_SETTINGS]
    for key in given:
        if key not in names:
            # Without its value: a variable that we do not know may well hold a secret.
            raise unknown(key, key, names)
    return found | _named((key, names[key], environ[key]) for key in given if environ[key])


def _read_tree(tree: Mapping[Any, Any]) -> _Settings:
    keys = _listed(tree, "config")
    if not any(section in keys for section in _SECTIONS):
        return _named((str(key), key, _value(tree, key, str(key))) for key in keys)
    found: _Settings = {}
    for path, name in _VERL.items():
        section, key = path.split(".")
        value = _value(_section(tree, section), key, path)
        if value is not None:
            found[name] = (path, value)
    rollout = _section(_section(tree, "actor_rollout_ref"), "rollout", "actor_rollout_ref.")
    trace = _section(rollout, "trace", "actor_rollout_ref.rollout.")
    below = [(key, _value(trace, key, f"{_TRACE}.{key}")) for key in _listed(trace, _TRACE)]
    # verl writes the name of its own class there.
    found |= _named(
        (f"{_TRACE}.{key}", key, value) for key, value in below if key != "_target_" and value is not None
    )
    for parts, value in _paths(tree):
        _refuse_slip(parts, value)
    beside = [(key, _value(tree, key, key)) for key in keys if key in _NAMES]
    # A mapping under one of our names is a section of the user's own, unless it may be a value.
    return found | _named(
        (key, key, value)
        for key, value in beside
        if _NAMES[key] in PER_BACKEND or not isinstance(value, Mapping)
    )


def _section(tree: Mapping[Any, Any], key: str, above: str = "") -> Mapping[Any, Any]:
    value = _value(tree, key, above + key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong(above + key, value, "a mapping")
    return value


def _listed(node: Collection[Any], written: str) -> list[Any]:
    """Give the keys of a mapping, the items of a sequence."""
    try:
        return list(node)
    except Exception as error:  # OmegaConf: the node is null, ??? or an interpolation that leads nowhere
        raise ConfigError(f"{written} cannot be read: {_first_line(error)}") from error


def _value(node: Mapping[Any, Any], key: Any, written: str) -> Any:
    """Look up one key, None when it is not there; of an OmegaConf tree nothing else is resolved."""
    if key not in _listed(node, written):
        return None
    try:
        value = node[key]
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
            value = list(value)
    except Exception as error:  # OmegaConf: ??? or an interpolation that leads nowhere
        raise ConfigError(f"{written} has no value: {_first_line(error)}") from error
    return value


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _read_arguments(arguments: Sequence[Any]) -> _Settings:
    tree: dict[str, Any] = {}
    option = False
    for argument in arguments:
        if not isinstance(argument, str):
            raise ConfigError(f"config holds {show(argument)}; expected key=value as text")
        # --config-name=x, --config-name x and ~key speak to Hydra, not to us.
        after_option, option = option, argument.startswith("-") and "=" not in argument
        if argument.startswith(("-", "~")):
            continue
        key, equals, text = argument.lstrip("+").partition("=")
        key = key.strip()
        if not equals:
            if after_option:
                continue
            raise ConfigError(f"config holds {argument!r}; expected key=value")
        if _is_ours(key):
            value = _parse(key, text)
            if isinstance(value, Mapping) or key not in _HYDRA_GROUPS:
                _put(tree, key, value)
        elif not re.search(r"[./@]", key):
            if key not in _HYDRA_GROUPS:
                raise unknown(f"{key}={show(text)}", key, _NAMES)
        else:
            _refuse_slip(key.split("."), text)
    return _read_tree(tree)


def _is_ours(key: str) -> bool:
    """Whether the key holds a setting, or stands above or below one in verl's tree."""
    above = any(f"{path}.".startswith(f"{key}.") for path in (*_VERL, _TRACE))
    below = key.startswith((f"{_TRACE}.", *(f"{name}." for name in PER_BACKEND)))
    return above or below or key in _NAMES


def _refuse_slip(parts: Sequence[str], value: Any) -> None:
    """Refuse a key of verl's tree that is not one of ours and can hardly be meant for another.

    Raises:
        ConfigError: it is written almost as one of ours, or is one of ours in another section.
    """
    *above, name = parts
    written = ".".join(parts)
    meant = None
    if _is_ours(written):
        return
    if not above:
        # Short names are near to many others.
        slips = [known for known in _NAMES if len(known) > _SHORT_NAME and close(name, known)]
        meant = slips[0] if slips and not isinstance(value, Mapping) else None
    elif slip := next((known for known in PER_BACKEND if len(above) == 1 and close(above[0], known)), None):
        meant = f"{slip}.{name}"
    elif name in _NAMES and (close(above[-1], "trace") or above[-1] == "trackway"):
        meant = f"{_TRACE}.{name}"
    else:
        for known in (*_VERL, _TRACE, *(f"{_TRACE}.{setting}" for setting in _NAMES)):
            wanted = known.split(".")
            if len(wanted) == len(parts) and all(map(close, parts, wanted)):
                meant = known
                break
    if meant:
        raise ConfigError(f"{written}={show(value)}: there is no such setting; did you mean {meant!r}?")


_SHORT_NAME = 5


def _paths(
    tree: Mapping[Any, Any], above: tuple[str, ...] = (), depth: int = 5
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Give all keys down to some depth, with their values as they are written."""
    if not above and type(tree).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf

        # Nothing of what belongs to others is to be resolved.
        tree = OmegaConf.to_container(tree, resolve=False)
    for key, value in tree.items():
        path = (*above, str(key))
        yield path, value
        if isinstance(value, Mapping) and depth > 1:
            yield from _paths(value, path, depth - 1)


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key; a mapping is merged into what is there, as Hydra does."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _put(tree, f"{key}.{name}", inner)
        return
    *above, name = key.split(".")
    for part in above:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[name] = value


def _parse(key: str, text: str) -> Any:
    """Read the value of one argument as YAML, but a text as it was typed (``run_id=1e10``)."""
    if _NAMES.get(key.rpartition(".")[2]) in TEXTS:
        text = text.strip()
        if text in ("", "~", "null", "Null", "NULL"):
            return None
        return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
    try:
        return load_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{key}={show(text)} is not a value that YAML can read: {error}") from None


def _read_file(path: Path) -> Mapping[Any, Any]:
    name = repr(str(path))
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        hint = "; give the arguments of a command line as a list" if "=" in name else ""
        raise ConfigError(f"config {name} cannot be read: {error}{hint}") from error
    try:
        data = load_yaml(text)
    except ValueError as error:
        raise ConfigError(f"config {name} is not YAML: {error}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"config {name} holds {show(data)}; expected a mapping of settings")
    if "${" not in text:
        return data
    # The file that Hydra saves beside a run keeps its interpolations.
    try:
        from omegaconf import OmegaConf
    except ImportError:
        return data
    try:
        tree: Mapping[Any, Any] = OmegaConf.create(dict(data))
    except Exception as error:
        raise ConfigError(f"config {name} cannot be read: {_first_line(error)}") from error
    return tree
