"""A training run of verl without the training: two steps and a validation, by its real workers in Ray.

It reads what to do as JSON from its command line, and writes as JSON what verl's workers gave the trainer.
Ray listens on more than the loopback, so it belongs into a network of its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
from omegaconf import OmegaConf
from verl import DataProto
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.utils.tracking import Tracking
from verl_world import Engine, N, make_config

STEPS = ((1, False), (2, False), (2, True))


def main() -> None:
    job = json.loads(sys.argv[1])
    ray.init(num_cpus=8, include_dashboard=False, _node_ip_address="127.0.0.1")
    # verl's trainer is no part of the program that starts Ray either.
    answer = ray.get(ray.remote(train).remote(job))
    Path(job["out"]).write_text(json.dumps(answer))
    ray.shutdown()


def train(job: dict[str, Any]) -> list[Any]:
    from verl.experimental.reward_loop import RewardLoopManager
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    config = make_config(Path(job["model"]), job["overrides"])
    engine = ray.remote(Engine).options(max_concurrency=1000).remote(job["model"])
    balancer = ray.remote(GlobalRequestLoadBalancer).remote(servers={"engine": engine})
    parts = {
        "config": config,
        "llm_client": LLMServerClient(config=config, load_balancer_handle=balancer),
        "reward_loop_worker_handles": RewardLoopManager(config).reward_loop_worker_handles,
    }
    trainer = {"v0": by_v0, "v1": by_v1}[job["trainer"]](config, parts)
    tracking = Tracking("verl-tests", "tools", config.trainer.logger, config=OmegaConf.to_container(config))
    answer = []
    for _ in range(job.get("rounds", 1)):
        for step, validate in STEPS:
            ray.get(engine.update.remote(step))
            answer.append(trainer(step, validate))
            tracking.log({"reward": 1.0}, step=step)
    tracking.finish()
    return answer


def batches(config: Any) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.actor_rollout_ref.model.path)
    data = RLHFDataset(config.data.train_files, tokenizer, config.data)
    batch: dict[str, Any] = collate_fn([data[place] for place in range(len(data))])
    return batch


def by_v0(config: Any, parts: dict[str, Any]) -> Any:
    """As ``verl.trainer.ppo.ray_trainer`` does it."""
    from verl.experimental.agent_loop import AgentLoopManager
    from verl.protocol import pad_dataproto_to_divisor

    manager = AgentLoopManager.create(**parts)

    def run(step: int, validate: bool) -> Any:
        batch = DataProto.from_single_dict(batches(config))
        size = len(batch)
        batch.non_tensor_batch["uid"] = np.array([f"{step}{validate}{i}" for i in range(size)], dtype=object)
        batch = batch.pop(batch_keys=[], non_tensor_batch_keys=list(batch.non_tensor_batch))
        batch.meta_info = {"global_steps": step, "validate": validate}
        batch = batch.repeat(1 if validate else N, interleave=True)
        batch, _ = pad_dataproto_to_divisor(batch, config.actor_rollout_ref.rollout.agent.num_workers)
        out = manager.generate_sequences(batch)
        tensors = {name: tensor.tolist() for name, tensor in out.batch.items()}
        plain = {
            name: [_plain(item) for item in array]
            for name, array in out.non_tensor_batch.items()
            if name != "multi_modal_inputs"
        }
        return {**tensors, **plain}

    return run


def by_v1(config: Any, parts: dict[str, Any]) -> Any:
    """As ``verl.trainer.ppo.v1`` does it."""
    import transfer_queue as tq
    from verl.trainer.ppo.v1 import AgentLoopManagerTQ
    from verl.utils import tensordict_utils as tu

    tq.init(config.transfer_queue)
    manager = AgentLoopManagerTQ.create(**parts)

    def run(step: int, validate: bool) -> Any:
        rows = batches(config)
        rows["uid"] = np.array([f"{step}{validate}{i}" for i in range(len(rows["raw_prompt"]))], dtype=object)
        batch = tu.get_tensordict(rows)
        tu.assign_non_tensor_data(batch, "global_steps", step)
        if validate:
            tu.assign_non_tensor_data(batch, "validate", True)
        partition = "val" if validate else "train"
        tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in range(len(batch))]
        tq.kv_batch_put(keys=list(batch["uid"]), partition_id=partition, tags=tags)
        manager.generate_sequences(batch)
        keys = sorted(_finished(tq, partition, set(rows["uid"])))
        fields = ["prompts", "responses", "response_mask", "rm_scores", "rollout_log_probs", "num_turns"]
        found = tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=fields)
        return sorted(
            [key.rpartition("_")[0].rpartition("_")[0], *(_plain(found[name][place]) for name in fields)]
            for place, key in enumerate(keys)
        )

    return run


def _finished(tq: Any, partition: str, uids: set[str]) -> Iterator[str]:
    for _ in range(600):
        tags = tq.kv_list(partition_id=partition)[partition]
        if all(tags.get(uid, {}).get("status") in ("finished", "failure") for uid in uids):
            return (key for key in tags if key not in uids and key.partition("_")[0] in uids)
        time.sleep(0.1)
    raise TimeoutError(f"not finished: {tags}")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else getattr(value, "data", value)


if __name__ == "__main__":
    main()
