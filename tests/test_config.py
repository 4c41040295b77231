"""Settings: where they come from, which one wins, and what a wrong one says."""

import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from trackway.trace.config import ConfigError, TraceConfig, exporter_names, from_dict, load_config, to_dict

TRACE = "actor_rollout_ref.rollout.trace"

# The shape of verl 0.9's composed configuration, as Hydra writes it beside a run.
VERL_YAML = """
actor_rollout_ref:
  hybrid_engine: true
  model:
    path: ???
  rollout:
    name: vllm
    n: 4
    trace:
      _target_: verl.workers.config.TraceConfig
      project_name: ${oc.select:trainer.project_name,null}
      experiment_name: ${oc.select:trainer.experiment_name,null}
      backend: mlflow
      token2text: true
      max_samples_per_step_per_worker: 2
      max_length: null
data:
  tokenizer: null
  train_batch_size: 64
  val_batch_size: null
  seed: 7
trainer:
  project_name: calc
  experiment_name: grpo
  logger: [console, mlflow]
  log_val_generations: 10
  save_freq: -1
algorithm:
  gamma: 1.0
ray_kwargs: {}
"""
VERL_ARGUMENTS = [
    "--config-name=ppo_trainer",
    "--config-path",
    "config",
    "model_engine=megatron",
    "data=legacy_data",
    "optim@actor_rollout_ref.actor.optim=fsdp",
    f"{TRACE}.backend=mlflow",
    f"+{TRACE}.token2text=True",
    f"++{TRACE}.max_samples_per_step_per_worker=2",
    f"{TRACE}.max_length=null",
    "~trainer.rollout_data_dir",
    "data.train_batch_size=64",
    "data.seed=7",
    "data.train_files=['a.parquet','b.parquet']",
    "trainer.project_name=calc",
    "trainer.experiment_name='grpo'",
    'trainer.logger=["console","mlflow"]',
    "trainer.log_val_generations=10",
    "trainer=ray",
]


def load(config: Any = None, **settings: Any) -> TraceConfig:
    return load_config(config, environ={}, **settings)


def message(config: Any = None, environ: dict[str, str] | None = None, **settings: Any) -> str:
    """Give the text of the error that these settings must cause."""
    with pytest.raises(ConfigError) as caught:
        load_config(config, environ=environ or {}, **settings)
    return str(caught.value)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


# The forms


def test_nothing_set_gives_the_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load() == TraceConfig()
    assert load().store == tmp_path / "trackway-store"
    assert load().backend == ()
    assert load().max_length == 4096


def test_the_store_is_absolute_and_knows_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert load(store="runs/a").store == tmp_path / "runs/a"
    assert load(["store=~/runs"]).store == tmp_path / "home/runs"
    assert load_config(environ={"TRACKWAY_STORE": "~/runs"}).store == tmp_path / "home/runs"


@pytest.mark.parametrize(
    ("uri", "kept"),
    [
        ("sqlite:///m.db", "sqlite:///{here}/m.db"),
        ("sqlite+pysqlite:///a/m.db?timeout=9", "sqlite+pysqlite:///{here}/a/m.db?timeout=9"),
        ("sqlite:///~/m.db", "sqlite:///{here}/home/m.db"),
        ("file:runs", "file://{here}/runs"),
        ("./runs", "file://{here}/runs"),
        (Path("runs"), "file://{here}/runs"),
        *[
            (uri, uri)
            for uri in (
                "sqlite:////data/m.db",
                "sqlite:///file:m.db?uri=true",
                "file:///data/a%20b",
                "http://host",
                "https://user:word@host:5000/path",
                "postgresql+psycopg2://user@host/name",
                "postgresql:///name",
                "databricks",
                "databricks://profile",
            )
        ],
    ],
)
def test_a_tracking_uri_means_the_same_in_every_directory(uri, kept, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = load(tracking_uri=uri)
    assert config.tracking_uri == kept.format(here=tmp_path)
    monkeypatch.chdir("/")
    assert from_dict(to_dict(config)) == config


@pytest.mark.parametrize("name", ["project", "experiment", "store", "tokenizer", "tracking_uri"])
def test_text_that_no_file_could_hold_is_refused_with_its_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}='a.{{6}}b' is not allowed; expected text that UTF-8"):
        load(**{name: "a\ud800b"})


@pytest.mark.parametrize(
    "uri",
    [
        *("nonsense://x", "http:/bad", "http://", "https://host:port", "http://host:99999", "http://a b"),
        *(
            "sqlite://",
            "sqlite:///",
            "sqlite:///:memory:",
            "sqlite:m.db",
            "postgresql://",
            "file://host/a",
            " ",
        ),
    ],
)
def test_a_tracking_uri_that_leads_nowhere_is_an_error(uri):
    assert "http://host:5000" in message(tracking_uri=uri) or uri == " "
    assert message(environ={"MLFLOW_TRACKING_URI": uri}).startswith("MLFLOW_TRACKING_URI=")


def test_a_tracking_uri_is_shown_without_its_password():
    text = message(tracking_uri="postgre://user:hunter2@host/name")
    assert "hunter2" not in text and "did you mean 'postgresql'?" in text


def test_the_flat_form_means_the_same_wherever_it_is_written(tmp_path):
    wanted = load(
        project="p",
        experiment="e",
        backend=("mlflow",),
        token2text=True,
        max_length=1000,
        max_text_length=None,
        ratio=0.25,
        keep_samples=(17, "ab"),
        mask_fields=("mask", "loss_mask"),
        sync="off",
    )
    text = (
        "project_name: p\nexperiment: e\nbackend: [mlflow]\ntoken2text: true\nmax_length: 1000\n"
        "max_text_length: null\nratio: 0.25\nkeep_samples: [17, ab]\nmask_fields: [mask, loss_mask]\n"
        "sync: off\n"
    )
    arguments = [
        "project=p",
        "experiment_name=e",
        "backend=mlflow",
        "token2text=true",
        "max_length=1000",
        "max_text_length=null",
        "ratio=25e-2",
        "keep_samples=[17,ab]",
        "mask_fields=[mask,loss_mask]",
        "sync=off",
    ]
    variables = {
        "TRACKWAY_PROJECT": "p",
        "TRACKWAY_EXPERIMENT_NAME": "e",
        "TRACKWAY_BACKEND": "mlflow",
        "TRACKWAY_TOKEN2TEXT": "True",
        "TRACKWAY_MAX_LENGTH": "1000",
        "TRACKWAY_MAX_TEXT_LENGTH": "none",
        "TRACKWAY_RATIO": "0.25",
        "TRACKWAY_KEEP_SAMPLES": "17, ab",
        "TRACKWAY_MASK_FIELDS": "mask,loss_mask",
        "TRACKWAY_SYNC": "off",
    }
    assert load(yaml.safe_load(text)) == wanted
    assert load(OmegaConf.create(text)) == wanted
    assert load(write(tmp_path / "a.yaml", text)) == wanted
    assert load(str(write(tmp_path / "b.yaml", text))) == wanted
    assert load(arguments) == wanted
    assert load(tuple(arguments)) == wanted
    assert load(OmegaConf.create(arguments)) == wanted
    assert load_config(environ=variables) == wanted


@pytest.mark.parametrize("form", ["dict", "omegaconf", "struct", "yaml", "saved", "arguments"])
def test_verls_tree_means_the_same_wherever_it_is_written(form, tmp_path):
    tree = OmegaConf.create(VERL_YAML)
    plain = yaml.safe_load(VERL_YAML.replace("${oc.select:trainer.project_name,null}", "calc"))
    plain["actor_rollout_ref"]["rollout"]["trace"]["experiment_name"] = None
    if form == "struct":
        OmegaConf.set_struct(tree, True)
        OmegaConf.set_readonly(tree, True)
    config = {
        "dict": plain,
        "omegaconf": tree,
        "struct": tree,
        "yaml": write(tmp_path / "plain.yaml", yaml.safe_dump(plain)),
        "saved": write(tmp_path / "saved.yaml", VERL_YAML),
        "arguments": VERL_ARGUMENTS,
    }[form]
    assert load(config) == load(
        project="calc",
        experiment="grpo",
        backend="mlflow",
        token2text=True,
        max_samples_per_step_per_worker=2,
        samples_per_step=64,
        log_val_generations=10,
    )


def test_null_in_verls_tree_is_not_set_but_a_flat_null_is_a_value():
    nulls = {
        "actor_rollout_ref": {"rollout": {"trace": {"max_length": None, "backend": None, "seed": None}}},
        "trainer": {"project_name": None, "log_frequency": None},
        "data": {"train_batch_size": None},
    }
    assert load(nulls) == TraceConfig()
    environ = {"TRACKWAY_BACKEND": "mlflow"}
    assert load_config(nulls, environ=environ).backend == ("mlflow",)
    assert load_config([f"{TRACE}.backend=null"], environ=environ).backend == ("mlflow",)
    assert load_config([f"{TRACE}.backend=none"], environ=environ).backend == ()
    assert load_config(backend=None, environ=environ).backend == ()
    assert load({"max_length": None}).max_length is None
    assert load(["max_length=null"]).max_length is None


@pytest.mark.parametrize(
    "tree", [{"actor_rollout_ref": None}, {"actor_rollout_ref": {"rollout": None}}, {"data": {}}]
)
def test_a_tree_of_verl_without_our_section_sets_nothing(tree):
    assert load(tree) == load(OmegaConf.create(tree)) == TraceConfig()


def test_the_names_under_trace_win_over_the_trainers():
    tree = {"trainer": {"project_name": "t", "experiment_name": "t", "log_frequency": 3}}
    assert load(tree).project == "t"
    assert load(tree).log_frequency == 3
    tree["actor_rollout_ref"] = {"rollout": {"trace": {"project_name": "own", "experiment_name": None}}}
    assert load(tree).project == "own"
    assert load(tree).experiment == "t"


def test_every_setting_of_ours_may_stand_under_trace():
    values = to_dict(load(tracking_uri="sqlite:///a.db", run_id="r", tokenizer="tok", samples_per_step=3))
    tree = {"actor_rollout_ref": {"rollout": {"trace": values}}, "data": {"train_batch_size": 64}}
    assert load(tree) == from_dict(values)


def test_a_command_line_may_mix_both_forms():
    config = load([f"{TRACE}.backend=mlflow", "max_length=7", f"{TRACE}={{token2text: true}}", "data.seed=1"])
    assert (config.backend, config.max_length, config.token2text, config.seed) == (("mlflow",), 7, True, 0)
    assert load({"trainer": {"logger": []}, "max_length": 7, "experiment": {"mine": 1}}).max_length == 7


def test_of_two_arguments_the_later_one_counts():
    assert load(["max_length=1", "max_length=2"]).max_length == 2
    config = load(["trainer={log_frequency: 2, project_name: a}", "trainer.project_name=b"])
    assert (config.log_frequency, config.project) == (2, "b")


@pytest.mark.parametrize("text", ["1.10", "1e10", "007", "true", "http://h:1/?a=b#c", "@x: #3", "[a", "it's"])
def test_texts_on_a_command_line_stay_as_typed(text):
    assert load([f"experiment={text}"]).experiment == text
    assert load([f"trainer.experiment_name='{text}'"]).experiment == text
    assert load([f'run_id="{text}"', f"+{TRACE}.tokenizer= {text} "]).run_id == text
    assert load([f"{TRACE}.tokenizer= {text} "]).tokenizer == text


def test_yaml_does_not_turn_names_into_something_else(tmp_path):
    text = (
        "project: 2024\nexperiment: 2024-01-02\nsync: off\nbackend: off\nrun_id: 1:30\n"
        "keep_samples: [017, 1:30, no]\n"
    )
    config = load(write(tmp_path / "a.yaml", text))
    assert (config.project, config.experiment, config.sync, config.backend) == (
        "2024",
        "2024-01-02",
        "off",
        (),
    )
    assert (config.run_id, config.keep_samples) == ("1:30", ("017", "1:30", "no"))
    # OmegaConf reads off as false before we see it.
    assert load(OmegaConf.create("sync: off\nbackend: off")).sync == "off"


@pytest.mark.parametrize(
    ("given_ids", "kept"),
    [
        ([17, "17"], (17, "17")),
        (range(3), (0, 1, 2)),
        ("17,ab,017", (17, "ab", "017")),
        ('[17, "17"]', (17, "17")),
        (17, (17,)),
        ("", ()),
    ],
)
def test_sample_ids_keep_their_type(given_ids, kept):
    ids = load(keep_samples=given_ids).keep_samples
    assert ids == kept
    assert [type(sample) for sample in ids] == [type(sample) for sample in kept]


def test_a_bare_number_on_a_command_line_is_one_sample():
    assert load(["keep_samples=17"]).keep_samples == (17,)
    assert load(["keep_samples=17,18"]).keep_samples == (17, 18)


@pytest.mark.parametrize("text", ["True", "true", " TRUE ", "1", "yes", "on"])
def test_a_text_can_be_true(text):
    assert load(token2text=text).token2text is True


@pytest.mark.parametrize("text", ["False", "false", "0", "no", "off"])
def test_a_text_can_be_false(text):
    assert load_config(environ={"TRACKWAY_TOKEN2TEXT": text}).token2text is False


def test_a_tokenizer_is_an_object_or_a_path(tmp_path):
    tokenizer = object()
    assert load(tokenizer=tokenizer).tokenizer is tokenizer
    assert load({"tokenizer": tokenizer}).tokenizer is tokenizer
    assert load(tokenizer=tmp_path).tokenizer == str(tmp_path)


# Precedence


def test_arguments_win_over_config_over_variables_over_defaults():
    environ = {"TRACKWAY_PROJECT": "env", "TRACKWAY_EXPERIMENT": "env", "TRACKWAY_SEED": "1"}
    config = load_config({"project": "conf", "experiment": "conf"}, environ=environ, project="arg")
    assert (config.project, config.experiment, config.seed, config.ratio) == ("arg", "conf", 1, 1.0)


@given(st.sets(st.sampled_from(["arg", "conf", "env", "mlflow"])))
def test_the_strongest_source_wins_whatever_the_others_say(sources):
    environ = {}
    if "env" in sources:
        environ["TRACKWAY_RUN_ID"] = "env"
    if "mlflow" in sources:
        environ["MLFLOW_RUN_ID"] = "mlflow"
    config = {"run_id": "conf"} if "conf" in sources else None
    settings = {"run_id": "arg"} if "arg" in sources else {}
    wanted = next((name for name in ("arg", "conf", "env", "mlflow") if name in sources), None)
    assert load_config(config, environ=environ, **settings).run_id == wanted


def test_variables_of_mlflow_are_honoured(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    monkeypatch.setenv("MLFLOW_RUN_ID", "abc")
    assert load_config().tracking_uri == "http://mlflow:5000"
    assert load_config().run_id == "abc"


def test_variables_that_are_empty_or_no_settings_are_passed_over():
    environ = {
        "TRACKWAY_MAX_LENGTH": "",
        "MLFLOW_RUN_ID": "",
        "TRACKWAY_STRICT": "1",
        "TRACKWAY_VERL": "0",
        "TRACKWAY_DEMO_MODEL": "m",
        "X": "1",
    }
    assert load_config(environ=environ) == TraceConfig()


# Backends


@pytest.mark.parametrize(
    "nothing", [None, "", "none", "None", "null", "off", " ", (), [], [None], ["none"], False]
)
def test_no_backend_is_a_choice(nothing):
    assert load_config(backend=nothing, environ={"TRACKWAY_BACKEND": "mlflow"}).backend == ()


@pytest.mark.parametrize(
    "spelling", ["mlflow", "MLflow", " mlflow ", "mlflow,MLFLOW", ["mlflow", "MLflow"], "[mlflow]"]
)
def test_backends_forgive_case_spaces_and_repetition(spelling):
    assert load(backend=spelling).backend == ("mlflow",)
    assert load({"backend": spelling}).backend == ("mlflow",)


@pytest.mark.parametrize("wrong", ["mlfow", "mlflow,mlfow", ["mlflow", "mlfow"], "mlflow2"])
def test_an_unknown_backend_names_the_nearest(wrong):
    text = message(
        [f"{TRACE}.backend={wrong}" if isinstance(wrong, str) else f"{TRACE}.backend=[{','.join(wrong)}]"]
    )
    assert text.startswith(f"{TRACE}.backend=")
    assert "did you mean 'mlflow'?" in text
    assert all(name in text for name in exporter_names())
    assert "null for the journal only" in text


@pytest.mark.parametrize(
    "wrong", [True, 5, ["mlflow", "none"], ["mlflow", None], {"mlflow": 1}, "tensorboard", [["mlflow"]]]
)
def test_what_is_no_backend_is_an_error(wrong):
    assert "backend=" in message(backend=wrong)


def test_backends_are_the_installed_exporters():
    assert "mlflow" in exporter_names()


# Wrong settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_length", "abc"),
        ("max_length", "5 tokens"),
        ("max_length", True),
        ("max_length", -1),
        ("max_length", 0),
        ("max_length", 5.5),
        ("max_length", [5]),
        ("max_length", {"a": 5}),
        ("max_text_length", "many"),
        ("max_samples_per_step_per_worker", -1),
        ("max_samples_per_step_per_worker", False),
        ("max_samples_per_step", 1.5),
        ("samples_per_step", 0),
        ("ratio", 1.01),
        ("ratio", -0.1),
        ("ratio", float("nan")),
        ("ratio", "nan"),
        ("ratio", True),
        ("ratio", None),
        ("val_ratio", 2),
        ("log_frequency", 0),
        ("log_val_generations", -2),
        ("seed", -1),
        ("seed", None),
        ("seed", "1e3"),
        ("token2text", "maybe"),
        ("token2text", 2),
        ("token2text", None),
        ("skip_special_tokens", "ja"),
        ("sync", "processes"),
        ("sync", True),
        ("sync", None),
        ("queue_policy", "dorp"),
        ("queue_timeout", float("inf")),
        ("queue_timeout", -1),
        ("queue_timeout", 10**400),
        ("max_queue_bytes", 4095),
        ("max_segment_bytes", 1),
        ("max_open_spans", 0),
        ("open_timeout", 0),
        ("max_segment_bytes", "64MiB"),
        ("max_array_items", -1),
        ("project", ""),
        ("project", None),
        ("experiment", True),
        ("store", ""),
        ("store", 5),
        ("store", "~no-such-user/runs"),
        ("tokenizer", 5),
        ("tracking_uri", ["a"]),
        ("keep_samples", [1.5]),
        ("keep_samples", [True]),
        ("keep_samples", {"a": 1}),
        ("prompt_fields", [1]),
        ("prompt_fields", ["a", ""]),
        ("redact", 5),
    ],
)
def test_a_wrong_value_names_the_key_the_value_and_what_is_allowed(name, value):
    text = message(**{name: value})
    assert text.startswith(f"{name}=")
    assert "expected" in text
    if isinstance(value, (str, int)) and value != 10**400:
        assert repr(value) in text
    key = f"{TRACE}.{name}"
    tree = {"actor_rollout_ref": {"rollout": {"trace": {name: value}}}}
    if value is not None:
        assert message(tree).startswith(f"{key}=")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_queue_bytes", 1, "a whole number of bytes, at least 4,096: a span must fit in"),
        ("max_segment_bytes", -1, "a whole number of bytes, at least 4,096: a line must fit in"),
        ("max_open_spans", 0, "a whole number, at least 1"),
        ("open_timeout", 0, "a number of at least 0.1, or null"),
    ],
)
def test_a_limit_that_is_too_small_is_refused_with_the_least_one(name, value, expected):
    assert message(**{name: value}) == f"{name}={value} is not allowed; expected {expected}"


def test_the_least_limits_are_taken():
    config = load(max_queue_bytes=4096, max_segment_bytes="4096", max_open_spans=1, open_timeout=0.1)
    assert (config.max_queue_bytes, config.max_segment_bytes) == (4096, 4096)
    assert (config.max_open_spans, config.open_timeout) == (1, 0.1)


@pytest.mark.parametrize(
    ("config", "environ", "start"),
    [
        ({"max_length": "abc"}, {}, "max_length='abc'"),
        (["max_length=abc"], {}, "max_length='abc'"),
        ([f"++{TRACE}.max_length=abc"], {}, f"{TRACE}.max_length='abc'"),
        (["data.train_batch_size=big"], {}, "data.train_batch_size='big'"),
        ({"trainer": {"log_frequency": "often"}}, {}, "trainer.log_frequency='often'"),
        (None, {"TRACKWAY_MAX_LENGTH": "abc"}, "TRACKWAY_MAX_LENGTH='abc'"),
        (None, {"TRACKWAY_PROJECT_NAME": "  "}, "TRACKWAY_PROJECT_NAME='  '"),
    ],
)
def test_the_key_is_named_as_it_was_written(config, environ, start):
    assert message(config, environ).startswith(start)


def test_a_wrong_value_that_a_stronger_source_replaces_does_no_harm():
    assert load_config(environ={"TRACKWAY_MAX_LENGTH": "abc"}, max_length=5).max_length == 5


@pytest.mark.parametrize(
    ("config", "environ", "key"),
    [
        ({"max_lenght": 5}, {}, "max_lenght"),
        (OmegaConf.create({"max_lenght": 5}), {}, "max_lenght"),
        (["max_lenght=5"], {}, "max_lenght"),
        (["data.seed=1", f"{TRACE}.backend=mlflow", "max_lenght=5"], {}, "max_lenght"),
        ([f"+{TRACE}.max_lenght=5"], {}, f"{TRACE}.max_lenght"),
        ({"actor_rollout_ref": {"rollout": {"trace": {"max_lenght": 5}}}}, {}, f"{TRACE}.max_lenght"),
        (["+Max_Length=5"], {}, "Max_Length"),
    ],
)
def test_an_unknown_key_names_the_nearest(config, environ, key):
    text = message(config, environ)
    assert text.startswith(f"{key}=")
    assert "5" in text
    assert "did you mean 'max_length'?" in text
    assert "max_samples_per_step_per_worker" in text  # one of those that are allowed


@pytest.mark.parametrize(
    ("config", "key", "meant"),
    [
        (["actor_rollout_ref.rollout.trce.backend=5"], None, f"{TRACE}.backend"),
        (["+actor_rollout_ref.rollout.traces.backend=5"], None, f"{TRACE}.backend"),
        (["actor_rollout_ref.rolout.trace.backend=5"], None, f"{TRACE}.backend"),
        (["actor_rollout.rollout.trace.backend=5"], None, f"{TRACE}.backend"),
        (["actor_rollout_ref.trace.max_length=5"], None, f"{TRACE}.max_length"),
        (["trace.backend=5"], None, f"{TRACE}.backend"),
        (["trackway.backend=5"], None, f"{TRACE}.backend"),
        (["trainer.projet_name=5"], None, "trainer.project_name"),
        (["trainer.log_val_generation=5"], None, "trainer.log_val_generations"),
        (["data.train_batchsize=5"], None, "data.train_batch_size"),
        (["actor_rollout_ref.rollout={trce: {token2text: 5}}"], "rollout.trce=", TRACE),
        ({"trainer": {}, "bakend": 5}, "bakend=", "backend"),
        ({"trainer": {"projet_name": 5}}, "trainer.projet_name=", "trainer.project_name"),
        (OmegaConf.create({"trainer": {"projet_name": 5}}), "projet_name=", "trainer.project_name"),
        ({"data": {}, "actor_rollout": {"rollout": {"trace": {"backend": 5}}}}, "actor_rollout.", TRACE),
    ],
)
def test_a_slip_in_the_path_of_a_key_is_an_error(config, key, meant):
    text = message(config)
    assert (key or config[0].lstrip("+").partition("=")[0]) in text
    assert f"there is no such setting; did you mean {meant!r}?" in text


# What verl 0.9 has beside the keys that we read.
VERLS_OWN = {
    "trainer": "balance_batch critic_warmup default_hdfs_dir default_local_dir device logger nnodes "
    "n_gpus_per_node project_name experiment_name log_val_generations resume_mode rollout_data_dir "
    "save_freq test_freq total_epochs use_v1 v1 val_before_train val_only validation_data_dir",
    "data": "gen_batch_size train_batch_size val_batch_size train_files val_files train_max_samples "
    "val_max_samples max_prompt_length max_response_length tokenizer seed shuffle truncation prompt_key",
    "actor_rollout_ref.rollout": "agent calculate_log_probs dtype ignore_eos load_format max_model_len mode "
    "multi_turn n name prompt_length response_length seed temperature top_k top_p trace.project_name",
    "actor_rollout_ref.rollout.trace": "experiment_name max_samples_per_step_per_worker",
    "actor_rollout_ref": "hybrid_engine nccl_timeout",
    "actor_rollout_ref.actor": "rollout_n ppo_epochs optim.lr",
    "critic": "rollout_n profiler.tool_config.torch_memory.trace_alloc_max_entries",
    "reward.reward_model.rollout": "name prompt_length trace_dir",
    "algorithm.rollout_correction": "rollout_is rollout_rs",
    "global_profiler.global_tool_config.nsys.worker_nsight_options": "trace cuda-graph-trace",
}


def test_keys_of_verls_own_are_never_taken_for_slips():
    keys = [f"{section}.{name}" for section, names in VERLS_OWN.items() for name in names.split()]
    for key in keys:
        load([f"{key}=1"])
    tree = OmegaConf.from_dotlist([f"{key}=1" for key in keys])
    tree.reward_model = {"enable": False}
    assert load(tree) == load(OmegaConf.to_container(tree))
    assert load(tree).project == "1"


def test_an_unknown_keyword_names_the_nearest():
    assert "max_samples_per_step_per_workers=2: " in message(max_samples_per_step_per_workers=2)
    assert "did you mean 'max_samples_per_step_per_worker'?" in message(max_samples_per_step_per_workers=2)
    assert "did you mean" not in message(zzz=2)


def test_an_unknown_variable_names_the_nearest_and_hides_its_value():
    text = message(environ={"TRACKWAY_MAX_LENGHT": "hunter2"})
    assert text.startswith("TRACKWAY_MAX_LENGHT:")
    assert "did you mean 'TRACKWAY_MAX_LENGTH'?" in text
    assert "hunter2" not in text


def test_a_key_below_a_setting_is_an_error():
    assert message([f"{TRACE}.backend.name=mlflow"]).startswith(f"{TRACE}.backend=")


def test_one_setting_under_two_names_is_an_error():
    assert "same setting" in message(project="a", project_name="b")
    assert "same setting" in message({"experiment": "a", "experiment_name": "a"})
    assert "same setting" in message(environ={"TRACKWAY_PROJECT": "a", "TRACKWAY_PROJECT_NAME": "b"})
    assert load({"project": "a"}, project_name="b").project == "b"


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"actor_rollout_ref": 5}, "actor_rollout_ref=5"),
        ({"actor_rollout_ref": {"rollout": "vllm"}}, "actor_rollout_ref.rollout='vllm'"),
        ({"actor_rollout_ref": {"rollout": {"trace": "mlflow"}}}, f"{TRACE}='mlflow'"),
        ({"data": []}, "data=[]"),
    ],
)
def test_a_section_that_is_none_is_an_error(tree, key):
    assert message(tree).startswith(key)
    assert "a mapping" in message(tree)


def test_a_missing_value_is_an_error():
    assert message(OmegaConf.create({"max_length": "???"})).startswith("max_length ")
    tree = OmegaConf.create({"actor_rollout_ref": {"rollout": {"trace": {"backend": "???"}}}})
    assert message(tree).startswith(f"{TRACE}.backend ")
    assert message({"project": "???"}).startswith("project ")
    assert message(OmegaConf.create({"actor_rollout_ref": "???"})).startswith("actor_rollout_ref ")
    assert message(OmegaConf.create({"backend": ["???"]})).startswith("backend ")
    assert message(OmegaConf.create(["???"])).startswith("config ")


def test_an_interpolation_that_leads_nowhere_is_an_error(tmp_path):
    tree = {"actor_rollout_ref": {"rollout": {"trace": {"project_name": "${nowhere.name}"}}}}
    assert message(OmegaConf.create(tree)).startswith(f"{TRACE}.project_name ")
    assert "nowhere" in message(OmegaConf.create(tree))
    assert message(tree).startswith(f"{TRACE}.project_name=")
    assert "OmegaConf" in message(tree)
    assert message(["trainer.experiment_name=${now:%Y}"]).startswith("trainer.experiment_name=")
    assert message(write(tmp_path / "a.yaml", yaml.safe_dump(tree))).startswith(f"{TRACE}.project_name ")
    assert "cannot be read" in message(write(tmp_path / "b.yaml", "project: ${a"))


def test_what_is_not_ours_is_never_resolved():
    config = OmegaConf.create(
        {
            "trainer": {"nnodes": "${no.such}", "log_frequency": 2},
            "data": "${trainer}",
            "reward": {"path": "???"},
        }
    )
    assert load(config).log_frequency == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n- b\n", "expected a mapping"),
        ("just text", "expected a mapping"),
        ("", "expected a mapping"),
        ("a: [1", "is not YAML"),
        ("a: !!python/object/apply:os.system [ls]", "is not YAML"),
    ],
)
def test_a_yaml_file_that_holds_no_settings_is_an_error(text, says, tmp_path):
    path = write(tmp_path / "bad.yaml", text)
    assert says in message(path)
    assert "bad.yaml" in message(path)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    assert "nowhere.yaml" in message(tmp_path / "nowhere.yaml")
    assert str(tmp_path) in message(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"project: \xff\xfe")
    assert "latin.yaml" in message(tmp_path / "latin.yaml")
    assert "as a list" in message("max_length=5")
    assert "cannot be read" in message("a\0b")
    assert "cannot be read" in message("~no-such-user/a.yaml")


@pytest.mark.parametrize("config", [5, b"max_length=5", object(), iter(())])
def test_a_config_of_another_kind_is_an_error(config):
    assert "expected a mapping" in message(config)


@pytest.mark.parametrize(
    ("arguments", "says"), [(["train"], "'train'"), ([5], "5"), (["max_length=[1"], "max_length='[1'")]
)
def test_an_argument_that_is_no_setting_is_an_error(arguments, says):
    assert says in message(arguments)


def test_an_object_is_shown_by_its_type_only():
    class Secret:
        def __repr__(self) -> str:
            raise AssertionError("shown")

    assert "<Secret>" in message(max_length=Secret())
    assert "<Secret>" in message(backend=[Secret()])
    endless: list[Any] = []
    endless.append(endless)
    assert message(max_length=endless).startswith("max_length=")
    assert message(max_length=-(10**5000)).startswith("max_length=")
    assert len(message(max_length="x" * 10_000)) < 500


# Any input at all

junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["???", "${a}", "off", "mlflow"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from([f.name for f in fields(TraceConfig)])
key_texts = (
    st.sampled_from(["trainer.log_frequency", f"{TRACE}.max_length", TRACE, "data", "max_length", "a.b"])
    | st.text()
)


@given(names, junk)
def test_any_value_is_taken_or_refused_with_its_key(name, value):
    try:
        config = load(**{name: value})
    except ConfigError as error:
        assert str(error).startswith(name)
    else:
        data = json.loads(json.dumps(to_dict(config), allow_nan=False))
        assert from_dict(data) == config
        hash(config)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "+", "++", "~", "-"]), key_texts, st.sampled_from(["=", ""]), st.text()
        )
    )
)
def test_any_command_line_is_read_or_refused(parts):
    try:
        load(["".join(part) for part in parts])
    except ConfigError as error:
        assert str(error)


@given(
    st.dictionaries(
        st.sampled_from(["data", "trainer", "actor_rollout_ref", "max_length"]) | st.text() | st.integers(),
        junk,
    )
)
def test_any_mapping_is_read_or_refused(tree):
    try:
        load(tree)
    except ConfigError as error:
        assert str(error)


# The settings of another process


def test_settings_go_to_another_process_as_json(tmp_path):
    config = load(
        store=tmp_path,
        backend="mlflow",
        tokenizer=tmp_path / "tok",
        keep_samples=[1, "1"],
        max_length=None,
        val_ratio=0.5,
    )
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_a_tokenizer_that_is_an_object_stays_behind():
    config = load(tokenizer=object(), project="p")
    data = json.loads(json.dumps(to_dict(config)))
    assert from_dict(data).tokenizer is None
    assert from_dict(data).project == "p"


def test_settings_of_another_process_are_checked_and_alone(monkeypatch):
    monkeypatch.setenv("TRACKWAY_PROJECT", "env")
    assert from_dict({}).project == "trackway"
    with pytest.raises(ConfigError, match="max_lenght"):
        from_dict({"max_lenght": 5})
    with pytest.raises(ConfigError, match="config"):
        from_dict({"config": {"seed": 1}})


def test_the_settings_cannot_be_changed():
    with pytest.raises(AttributeError):
        load().ratio = 0.5  # type: ignore[misc]


def test_every_setting_is_explained():
    explained = re.findall(r"^ {4}(\w+): ", inspect.getdoc(TraceConfig) or "", re.MULTILINE)
    assert explained == [f.name for f in fields(TraceConfig)]


def test_reading_settings_needs_no_heavy_package():
    code = (
        "import sys; from trackway.trace.config import load_config;"
        "load_config(['max_length=5'], environ={});"
        "print(sorted({'omegaconf', 'mlflow', 'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    environ = {key: value for key, value in os.environ.items() if not key.startswith("TRACKWAY_")}
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ
    )
    assert out.stdout.strip() == "[]"
