"""How verl comes to be traced: by the plugin, by hand, as an external module; in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .verl_here import need_verl

pytestmark = pytest.mark.verl

LOOK = """
import json, sys
import verl
from verl.utils import rollout_trace
import verl.experimental.agent_loop.agent_loop as loop, verl.experimental.agent_loop.tool_agent_loop as tools
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
print(json.dumps({
    "home": rollout_trace.__name__,
    "in_use": [sys.modules["verl.utils.rollout_trace"].__name__, loop.rollout_trace_attr.__module__],
    "decorated": tools.ToolAgentLoop.run.__globals__["__name__"],
    "ours": sorted(name for name in sys.modules if name.startswith("trackway")),
    "variables": get_ppo_ray_runtime_env()["env_vars"],
}))
"""
OURS = "trackway.trace.integrations.verl"


def look(
    folder: Path, code: str = LOOK, **environment: str
) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """Run a program to its end, and give what it printed in its last line."""
    need_verl()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "TRACKWAY_STRICT": "0", **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if "traced" in line]


def test_without_the_variable_verl_is_as_it_was(tmp_path):
    found, done = look(tmp_path)
    assert found["home"] == "verl.utils.rollout_trace" and found["decorated"] == found["home"]
    # What has to be imported to read the variable, and nothing with anything in it.
    assert found["ours"] == [
        "trackway",
        "trackway.trace",
        "trackway.trace.integrations",
        OURS,
        f"{OURS}.plugin",
    ]
    assert not said(done) and not any(name.startswith("TRACKWAY") for name in found["variables"])


def test_with_the_variable_ours_stands_in_place_of_verls(tmp_path):
    found, done = look(tmp_path, TRACKWAY_VERL="1", TRACKWAY_RATIO="0.5", MLFLOW_RUN_ID="abc")
    assert found["in_use"] == [f"{OURS}.rollout_trace", f"{OURS}.rollout"]
    assert found["decorated"] == f"{OURS}.ops"
    assert not said(done) and not (tmp_path / "trackway-store").exists()
    variables = found["variables"]
    assert (variables["TRACKWAY_VERL"], variables["TRACKWAY_RATIO"]) == ("1", "0.5")
    # Workers stand in directories of their own, the store is where the program was started.
    assert variables["TRACKWAY_STORE"] == str(tmp_path / "trackway-store")
    assert variables["MLFLOW_RUN_ID"] == "abc" and "MLFLOW_TRACKING_URI" not in variables


def test_a_password_does_not_go_where_verl_prints_it(tmp_path):
    found, _ = look(tmp_path, TRACKWAY_VERL="1", MLFLOW_TRACKING_URI="http://me:secret@127.0.0.1:5000")
    assert "secret" not in json.dumps(found["variables"])


def test_secrets_of_the_loggers_do_not_go_there_either(tmp_path):
    secrets = {
        "TRACKWAY_EMAIL_PASSWORD": "sesame",
        "TRACKWAY_WEBHOOK_URL": "http://127.0.0.1/sesame",
        "TRACKWAY_WEBHOOK_HEADERS": '{"Authorization": "sesame"}',
    }
    found, _ = look(tmp_path, TRACKWAY_VERL="1", **secrets)
    assert "sesame" not in json.dumps(found["variables"])


def test_a_store_below_the_home_directory_is_handed_on_as_it_is_read(tmp_path):
    found, _ = look(tmp_path, TRACKWAY_VERL="1", TRACKWAY_STORE="~/kept", HOME=str(tmp_path))
    assert found["variables"]["TRACKWAY_STORE"] == str(tmp_path / "kept")


def test_who_only_asks_whether_a_module_exists_leaves_it_to_be_traced(tmp_path):
    asking = """
import importlib.util, json
import verl
assert importlib.util.find_spec("verl.tools.function_tool") is not None
from verl.tools.function_tool import FunctionTool
print(json.dumps(FunctionTool.call.__code__.co_filename))
"""
    found, _ = look(tmp_path, asking, TRACKWAY_VERL="1")
    assert found.endswith("trace/integrations/verl/tools.py")


def test_by_hand_and_again_does_the_same_and_the_workers_are_told(tmp_path):
    by_hand = f"import verl, {OURS} as t\nt.install(); t.install()\n{LOOK}"
    found, _ = look(tmp_path, by_hand)
    assert found["in_use"] == [f"{OURS}.rollout_trace", f"{OURS}.rollout"]
    assert found["variables"]["TRACKWAY_VERL"] == "1"


def test_as_an_external_module_of_verls(tmp_path):
    found, _ = look(tmp_path, VERL_USE_EXTERNAL_MODULES=f"{OURS}.external")
    assert found["in_use"] == [f"{OURS}.rollout_trace", f"{OURS}.rollout"]


def test_a_value_that_is_neither_0_nor_1_is_an_error_that_is_said(tmp_path):
    found, done = look(tmp_path, TRACKWAY_VERL="yes")
    assert found["home"] == "verl.utils.rollout_trace"
    (words,) = said(done)
    assert "'yes' is neither 0 nor 1" in words and "Set it to 1" in words


def test_too_late_says_which_modules_are_in_use(tmp_path):
    late = f"""
import json
import verl.experimental.agent_loop
import {OURS} as t
try:
    t.install()
except RuntimeError as error:
    print(json.dumps(str(error)))
"""
    words, _ = look(tmp_path, late)
    assert "verl.experimental.agent_loop.tool_agent_loop" in words and "TRACKWAY_VERL=1" in words


def test_too_late_is_also_who_only_took_the_settings_or_the_block(tmp_path):
    late = f"""
import json, sys
sys.modules["forbidden"] = None
import verl
import {OURS} as t
import verl.utils.rollout_trace
t.install()  # in time, since nobody uses it
del sys.modules["verl.utils.rollout_trace"], verl.utils.rollout_trace
from verl.utils.rollout_trace import RolloutTraceConfig
try:
    t.install()
except RuntimeError as error:
    print(json.dumps(str(error)))
"""
    words, _ = look(tmp_path, late)
    assert "__main__" in words and "forbidden" not in words


def test_an_odd_value_for_the_tracking_leaves_verls_and_says_so(tmp_path):
    asking = """
import json
import verl
from verl.utils.tracking import Tracking
print(json.dumps(Tracking.__module__))
"""
    found, done = look(tmp_path, asking, TRACKWAY_VERL="1", TRACKWAY_VERL_TRACKING="false")
    assert found == "verl.utils.tracking"
    assert "TRACKWAY_VERL_TRACKING='false' is neither 0 nor 1" in done.stderr


def test_a_part_that_another_verl_does_not_have_is_said_and_the_rest_is_traced(tmp_path):
    other = f"""
import verl
from verl.tools import function_tool
del function_tool.FunctionTool.call
import {OURS} as t
t.install()
{LOOK}
"""
    found, done = look(tmp_path, other)
    assert found["in_use"] == [f"{OURS}.rollout_trace", f"{OURS}.rollout"]
    (words,) = said(done)
    assert "verl.tools.function_tool is not as verl 0.9.1 has it" in words
