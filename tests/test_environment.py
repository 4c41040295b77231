"""What a run keeps of what it was made of: enough to run it again, and no secret."""

from __future__ import annotations

import dataclasses
import enum
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np

from trackway import Tracker
from trackway.trace.loggers.environment import facts
from trackway.trace.loggers.resolving import resolved


class Kind(enum.Enum):
    LORA = "lora"


@dataclasses.dataclass
class Model:
    path: Path
    kind: Kind = Kind.LORA


def test_a_configuration_becomes_plain_json():
    from omegaconf import OmegaConf

    config = {
        "model": Model(Path("a/b")), "lr": np.float64(0.5), "layers": (1, 2), "names": {"b", "a"}, 3: None,
        "api_key": "sk-abcdefgh12345678", "arguments": Namespace(seed=7, big=2**80), "odd": object(),
    }  # fmt: skip
    config["self"] = config
    found = resolved(config)
    json.dumps(found)
    assert found["model"] == {"path": "a/b", "kind": "LORA"}
    assert (found["lr"], found["layers"], found["names"], found["3"]) == (0.5, [1, 2], ["a", "b"], None)
    assert found["arguments"] == {"seed": 7, "big": str(2**80)}
    assert "sk-abc" not in json.dumps(found) and found["odd"] == "⟨builtins.object⟩"
    assert resolved(OmegaConf.create({"a": 1, "b": "${a}"})) == {"a": 1, "b": 1}
    assert resolved(OmegaConf.create({"a": "${nowhere}"})) == {"a": "${nowhere}"}
    assert resolved([1]) == {"config": [1]}


def test_the_environment_names_commit_and_changes_and_redacts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    assert facts()["git"] is None
    name = ("-c", "user.name=a", "-c", "user.email=a@b")
    Path("a.py").write_text("x = 1\n")
    for command in (["init", "-q"], ["add", "."], [*name, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], check=True)
    Path("a.py").write_text("key = 'sk-abcdefgh12345678'\n")
    monkeypatch.setenv("VLLM_API_KEY", "very-secret")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("UNRELATED", "1")
    found = facts()
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert found["git"]["commit"] == head.stdout.strip()
    assert "+key = " in found["git"]["diff"] and "sk-abc" not in found["git"]["diff"]
    assert found["variables"]["NCCL_DEBUG"] == "INFO"
    assert "very-secret" not in json.dumps(found) and "UNRELATED" not in found["variables"]
    assert found["packages"]["numpy"] == np.__version__


def test_a_run_keeps_its_environment(tmp_path):
    with Tracker("console", store=tmp_path) as tracker:
        pass
    kept = json.loads((tracker.run.directory / "environment.json").read_text())
    assert kept["packages"]["numpy"] == np.__version__ and kept["argv"]
