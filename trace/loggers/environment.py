"""What a run runs in: code, command, packages, machine, seeds, and the variables that matter."""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from ..capture.redact import MASK, Redactor
from ..capture.snapshot import clean
from .gitstate import git
from .resolving import redactor as own_redactor

VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_JOB_NODELIST"),
    *("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID", "SWANLAB_MODE", "TRACKIO_DIR"),
    *("WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_NAME", "WANDB_RUN_GROUP", "WANDB_DIR"),
    *("WANDB_BASE_URL", "TENSORBOARD_DIR", "PYTHONHASHSEED", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
    *("CUBLAS_WORKSPACE_CONFIG", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HF_HUB_OFFLINE"),
)
"""Variables of the environment that are recorded."""
PREFIXES = ("CUDA_", "NCCL_", "OMP_", "TORCH_", "PYTORCH_", "VLLM_", "SGLANG_", "VERL_", "TRACKWAY_")
"""How the names of others begin that are."""
_MOST_TEXT = 4096
_INSTALLED = re.compile(r"(.+?)-([^-]+)(?:-py[0-9.]+)?\.(?:dist|egg)-info")
_DRIVER = Path("/proc/driver/nvidia")


def facts() -> dict[str, Any]:
    """Describe what this process runs in; secrets are redacted.

    It changes nothing, draws no random number and imports no package; where PyTorch is imported already, it
    is asked for what it knows without touching a device.

    Returns:
        Plain JSON: ``git`` (see ``gitstate.git``; None outside of a repository), ``argv``, ``cwd`` (the home
        directory as ``~``), ``python``, ``platform``, ``host``, ``packages`` (name -> version), ``cuda``,
        ``seeds`` and ``variables``. What cannot be read is None.
    """
    redactor = own_redactor()
    parts: dict[str, Callable[[], Any]] = {
        "git": lambda: _git(redactor),
        "argv": lambda: _argv(getattr(sys, "argv", []), redactor),
        "cwd": _cwd,
        "python": platform.python_version,
        "platform": platform.platform,
        "host": lambda: clean(socket.gethostname()),
        "packages": _packages,
        "cuda": _cuda,
        "seeds": _seeds,
        "variables": lambda: _variables(redactor),
    }
    found: dict[str, Any] = {}
    for name, part in parts.items():
        try:
            found[name] = part()
        except Exception:  # of an odd machine all the rest is worth having
            found[name] = None
    return found


def _git(redactor: Redactor) -> dict[str, Any] | None:
    """Look where the program runs, then, as Hydra changes the directory, where its script lies."""
    script = Path(sys.argv[0]).parent if getattr(sys, "argv", None) else Path()
    return git(Path.cwd(), redactor) or git(script, redactor)


def _cwd() -> str:
    path, home = Path.cwd(), Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home() raises without one
    if home.is_absolute() and home != Path("/") and path.is_relative_to(home):
        path = Path("~") / path.relative_to(home)
    return clean(str(path))


def _argv(words: Sequence[Any], redactor: Redactor) -> list[str]:
    """Redact a command line: ``--api-key x``, ``--api_key=x``, ``trainer.api_key=x``, and by shape."""
    found: list[str] = []
    before = ""
    for word in map(str, words):
        name, equals, value = word.partition("=")
        if equals and redactor.is_secret_name(_option(name), value):
            word = f"{name}={MASK}"
        elif before.startswith("-") and not word.startswith("-"):
            word = MASK if redactor.is_secret_name(_option(before), word) else word
        before = "" if equals else word
        found.append(_short(redactor.text(clean(word))))
    return found


def _option(written: str) -> str:
    """Give the name that an option or a key of Hydra's ends in: ``api_key`` of ``+trainer.api-key``."""
    return written.lstrip("-+~").rpartition(".")[2].replace("-", "_")


def _short(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}⟨cut⟩"


def _packages() -> dict[str, str]:
    """Read the names of what is installed; opening a few hundred files for them would hold up others."""
    found: dict[str, str] = {}
    for place in dict.fromkeys(sys.path):
        try:
            entries = sorted(os.listdir(place or "."))  # noqa: PTH208 - names are enough
        except OSError:
            continue
        for entry in entries:
            match = _INSTALLED.fullmatch(entry)
            if match is not None:
                name = re.sub(r"[-_.]+", "-", match[1]).lower()
                if name not in found:
                    found[name] = match[2] + _origin(Path(place or ".") / entry)
    return dict(sorted(found.items()))


def _origin(info: Path) -> str:
    """Say that a package is of a commit or a folder, whose version number means little."""
    try:
        told = orjson.loads((info / "direct_url.json").read_bytes())
        commit = told.get("vcs_info", {}).get("commit_id")
        editable = told.get("dir_info", {}).get("editable")
    except (OSError, ValueError, AttributeError):
        return ""
    return f" (commit {str(commit)[:40]})" if commit else " (editable)" if editable else ""


def _cuda() -> dict[str, Any]:
    """Ask what is known anyway: to initialise CUDA here would break a later fork."""
    found: dict[str, Any] = {"driver": _driver(), "devices": list(_devices())}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = getattr(torch.version, "cuda", None)
        if torch.cuda.is_initialized():
            found["devices"] = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return found


def _driver() -> str | None:
    try:
        text = (_DRIVER / "version").read_text(errors="replace")
    except OSError:
        return None
    match = re.search(r"(?:Kernel Module.*?|\s)([0-9]+\.[0-9.]+)", text)
    return match[1] if match else None


def _devices() -> Iterator[str]:
    """Give the models of the devices as the driver names them."""
    try:
        paths = sorted((_DRIVER / "gpus").iterdir())
    except OSError:
        return
    for path in paths:
        try:
            text = (path / "information").read_text(errors="replace")
        except OSError:
            continue
        if match := re.search(r"^Model:\s*(.+)$", text, re.MULTILINE):
            yield match[1].strip()


def _seeds() -> dict[str, Any]:
    """Give those that can be asked for; what seeded numpy and random nobody knows afterwards."""
    found: dict[str, Any] = {}
    if seed := os.environ.get("PYTHONHASHSEED"):
        found["PYTHONHASHSEED"] = seed
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "initial_seed"):
        found["torch"] = int(torch.initial_seed())
    return found


def _variables(redactor: Redactor) -> dict[str, str]:
    found = {}
    for name, value in sorted(os.environ.copy().items()):
        if name in VARIABLES or name.startswith(PREFIXES):
            secret = name.startswith("TRACKWAY_WEBHOOK_") or redactor.is_secret_name(name, value)
            found[clean(name)] = MASK if secret else _short(redactor.text(clean(value)))
    return found
