"""How much less is written when one asks for less, in bytes, with the metrics that verl logs in a step."""

from __future__ import annotations

from pathlib import Path

from trackway.trace.loggers import Tracker, runlog

_THREE = ("mean", "max", "min")
METRICS = [
    *(
        f"actor/{name}"
        for name in ("entropy", "kl_loss", "pg_loss", "pg_clipfrac", "ppo_kl", "grad_norm", "lr")
    ),
    *(f"critic/{what}/{of}" for what in ("score", "rewards", "advantages", "returns") for of in _THREE),
    *(f"{what}/{of}" for what in ("response_length", "prompt_length") for of in (*_THREE, "clip_ratio")),
    *(f"timing_s/{name}" for name in ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "step")),
    *(f"timing_per_token_ms/{name}" for name in ("gen", "ref", "adv", "update_actor")),
    *(f"perf/{name}" for name in ("total_num_tokens", "time_per_step", "throughput", "mfu/actor")),
    *(f"num_turns/{of}" for of in _THREE),
    "training/global_step",
    "training/epoch",
]


def run(folder: Path, loggers: list[str], **settings) -> dict[str, int]:
    """Log 400 steps with a validation in every hundredth; give the bytes of everything that was written."""
    folder.mkdir()
    with Tracker(
        loggers,
        store=folder / "store",
        **{"file": {"path": folder / "file.jsonl"}} if "file" in loggers else {},
        **{"tensorboard": {"dir": str(folder / "tensorboard")}} if "tensorboard" in loggers else {},
        **settings,
    ) as tracker:
        for step in range(1, 401):
            tracker.log_metrics({name: step / (n + 7) for n, name in enumerate(METRICS)}, step=step)
            if step % 100 == 0:
                tracker.log_metrics({"val-core/gsm8k/acc/mean@1": step / 400}, step=step)
                rows = [
                    {"sample_index": i, "prompt": f"{i} " * 100, "completion": f"{i} " * 500, "score": i % 2}
                    for i in range(200)
                ]
                tracker.log_generations(rows, step=step)
    log = tracker.run.directory / runlog.LOG
    found = {"log": log.stat().st_size}
    for path in folder.rglob("*"):
        if path.is_file() and "store" not in path.relative_to(folder).parts:
            name = path.relative_to(folder).parts[0]
            found[name] = found.get(name, 0) + path.stat().st_size
    history = runlog.history(log)
    assert list(history["critic/rewards/mean"]) == list(range(1, 401))  # what matters is all there
    assert list(history["val-core/gsm8k/acc/mean@1"]) == [100, 200, 300, 400]
    return found


def test_ten_generations_and_every_hundredth_step_are_a_fifth_at_most(tmp_path):
    loggers = ["file", "tensorboard"]
    whole = run(tmp_path / "whole", loggers, log_val_generations=-1)
    less = run(tmp_path / "less", loggers, log_val_generations=10, log_frequency=100)
    assert set(whole) == set(less) == {"log", "file.jsonl", "tensorboard"}
    for name, size in whole.items():
        assert less[name] <= 0.2 * size, name
    # Also where no generations are counted.
    metrics = run(tmp_path / "metrics", loggers, log_val_generations=0)
    fewer = run(tmp_path / "fewer", loggers, log_val_generations=0, log_frequency=100)
    for name, size in metrics.items():
        assert fewer[name] <= 0.2 * size, name
