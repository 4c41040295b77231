"""The drop-in for verl's tracing module: its names, and what its decorator and its block record."""

from __future__ import annotations

import asyncio
import functools
import inspect
import random
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trackway
from trackway.trace.capture import runtime
from trackway.trace.model import Span, Trajectory

from .verl_here import need_verl, recorded, tracing

pytestmark = pytest.mark.verl


@pytest.fixture(autouse=True)
def _verl():
    need_verl()


@pytest.fixture
def verls() -> Any:
    """Give verl's own module, which ours stands in for."""
    package = find_spec("verl")
    assert package and package.origin
    spec = spec_from_file_location("verls_own", Path(package.origin).parent / "utils" / "rollout_trace.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ours() -> Any:
    """Give what stands in place of verl's module."""
    from trackway.trace.integrations.verl import install

    install()
    from verl.utils import rollout_trace

    return rollout_trace


def one(store: Path) -> Trajectory:
    (found,) = recorded(store)
    return found


def shape(trajectory: Trajectory) -> list[tuple[int, str, str, str]]:
    """Give depth, name, kind and status of each span."""
    return [(depth, span.name, span.kind, span.status) for depth, span in trajectory.walk()]


def span_of(trajectory: Trajectory, name: str) -> Span:
    (found,) = [span for span in trajectory.spans if span.name == name]
    return found


# The names that verl's code uses


def test_everything_that_verl_imports_is_there_and_is_called_the_same_way(verls):
    ours()
    from verl.utils.rollout_trace import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op

    def parameters(function: Any) -> list[tuple[str, Any, Any]]:
        parts = inspect.signature(function).parameters.values()
        return [(part.name, part.kind, part.default) for part in parts]

    assert parameters(rollout_trace_attr) == parameters(verls.rollout_trace_attr)
    assert parameters(rollout_trace_op) == parameters(verls.rollout_trace_op)
    for name in ("init", "get_instance", "get_backend", "get_client", "enable_token2text", "reset"):
        assert parameters(getattr(RolloutTraceConfig, name)) == parameters(
            getattr(verls.RolloutTraceConfig, name)
        )
    attributes = {name for name in vars(verls.RolloutTraceConfig()) if not name.startswith("_")}
    attributes |= set(verls.RolloutTraceConfig.__annotations__) - {"_instance", "_initialized"}
    assert attributes <= set(dir(RolloutTraceConfig()))


def test_the_first_init_counts_until_the_reset(tmp_path):
    config = ours().RolloutTraceConfig
    with tracing(tmp_path / "store"):
        config.init("other", "other", "weave", True, 3)
        assert (config.get_instance().project_name, config.get_backend()) == ("project", None)
        assert not config.enable_token2text() and config.get_client() is None
    config.init("other", "other", None, True, None)
    assert config.get_instance().project_name == "other" and config.enable_token2text()
    trackway.shutdown()
    config.reset()
    assert config.get_instance().project_name is None


@pytest.mark.parametrize("backend", ["trackio", "mlfow"])
def test_an_unknown_backend_traces_nothing_and_says_so_once(tmp_path, backend, caplog):
    module = ours()

    @module.rollout_trace_op
    async def work() -> int:
        return 1

    async def rollout() -> int:
        with module.rollout_trace_attr(1, 1, 0):
            return await work()

    with tracing(tmp_path / "store", backend):
        assert [asyncio.run(rollout()) for _ in range(3)] == [1, 1, 1]
        assert runtime.started() is None
        assert module.RolloutTraceConfig.get_backend() == backend
    (said,) = [record.getMessage() for record in caplog.records if record.name == "trackway"]
    assert "no rollout is traced" in said and backend in said and "mlflow" in said
    assert not (tmp_path / "store").exists()


def test_nothing_is_traced_before_init(tmp_path, monkeypatch):
    module = ours()
    monkeypatch.setenv("TRACKWAY_STORE", str(tmp_path / "store"))
    module.RolloutTraceConfig.reset()

    @module.rollout_trace_op
    def work() -> int:
        return 1

    with module.rollout_trace_attr(1, 1, 0):
        assert work() == 1
    assert runtime.started() is None


# The block and the decorator


def test_a_block_is_a_trajectory_and_a_decorated_method_a_span_in_it(tmp_path):
    module = ours()

    class Loop:
        @module.rollout_trace_op
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            return {"kept": await self.generate("r", prompt_ids=[1, 2])}

        @module.rollout_trace_op
        async def generate(self, request_id: str, *, prompt_ids: list[int]) -> Any:
            extra = {"global_steps": 5, "min_global_steps": 4, "max_global_steps": 5}
            return SimpleNamespace(token_ids=[3], log_probs=[-0.5], extra_fields=extra)

    async def rollout() -> Any:
        with module.rollout_trace_attr(
            step=7, sample_index="a", rollout_n=2, name="agent_loop", validate=True
        ):
            return await Loop().run({"n": 1}, raw_prompt=["hello"])

    with tracing(tmp_path / "store"):
        result = asyncio.run(rollout())
        found = one(tmp_path / "store")
    assert result["kept"].token_ids == [3]
    assert (found.name, found.project, found.experiment) == ("val/7/a/2", "project", "experiment")
    assert shape(found) == [
        (0, "agent_loop", "trajectory", "ok"),
        (1, "Loop.run", "rollout", "ok"),
        (2, "Loop.generate", "llm", "ok"),
    ]
    (turn,) = [turn for turn in found.turns if turn.role == "assistant"]
    assert (turn.prompt_ids, turn.token_ids, turn.logprobs) == ((1, 2), (3,), (-0.5,))
    assert found.policy_versions == (4, 5)


def test_where_verl_says_no_nothing_is_recorded_and_what_follows_is(tmp_path):
    module = ours()

    @module.rollout_trace_op
    def work() -> None:
        pass

    with tracing(tmp_path / "store"):
        with module.rollout_trace_attr(1, 1, 0):
            with pytest.raises(ValueError), module.rollout_trace_attr(2, 1, 0, trace=False):
                work()
                raise ValueError
            work()
        found = one(tmp_path / "store")
    assert found.name == "1/1/0" and len(found.spans) == 2


def test_every_kind_of_function_is_traced_and_stays_what_it_is(tmp_path):
    module = ours()
    op = module.rollout_trace_op

    class Kinds:
        @op
        def method(self, number: int) -> int:
            return number

        @classmethod
        @op
        def of_class(cls, number: int) -> tuple[type, int]:
            return cls, number

        @op
        @classmethod
        def over_class(cls, number: int) -> tuple[type, int]:
            return cls, number

        @staticmethod
        @op
        async def static(number: int) -> int:
            return number

        @op
        def generator(self, number: int) -> Any:
            yield from range(number)

    @op
    def plain(number: int) -> int:
        return number

    @op
    async def waits(number: int) -> int:
        return number

    kinds = Kinds()
    with tracing(tmp_path / "store"):
        with module.rollout_trace_attr(1, 1, 0):
            assert kinds.method(1) == 1 and plain(2) == 2 and asyncio.run(waits(4)) == 4
            assert kinds.of_class(3) == (Kinds, 3) and Kinds.over_class(number=3) == (Kinds, 3)
            assert asyncio.run(Kinds.static(5)) == 5 and list(kinds.generator(2)) == [0, 1]
        found = one(tmp_path / "store")
    names = ["Kinds.method", "plain", "waits", "Kinds.of_class", "Kinds.over_class"]
    assert [span.name for span in found.spans[1:]] == [*names, "Kinds.static", "Kinds.generator"]
    assert [span.inputs for span in found.spans[1:]] == [{"number": n} for n in (1, 2, 4, 3, 3, 5, 2)]
    assert inspect.isgeneratorfunction(Kinds.generator) and inspect.iscoroutinefunction(waits)
    assert waits.__name__ == "waits" and inspect.signature(waits) == inspect.signature(waits.__wrapped__)


def test_a_plain_function_is_decoded_as_well(tmp_path):
    module = ours()

    class Tokenizer:
        def decode(self, ids: list[int], **_: Any) -> str:
            return " ".join(f"<{number}>" for number in ids)

    class Client:
        tokenizer = Tokenizer()

        @module.rollout_trace_op
        def generate(self, prompt_ids: list[int]) -> dict[str, list[int]]:
            return {"token_ids": [7, 8]}

    with tracing(tmp_path / "store", token2text="true"):
        with module.rollout_trace_attr(1, 1, 0):
            assert Client().generate([5]) == {"token_ids": [7, 8]}
        found = one(tmp_path / "store")
    assert [(turn.role, turn.text) for turn in found.turns] == [("user", "<5>"), ("assistant", "<7> <8>")]


def test_a_cancelled_rollout_is_cancelled(tmp_path):
    module = ours()

    @module.rollout_trace_op
    async def work(started: asyncio.Event) -> None:
        started.set()
        await asyncio.sleep(3600)

    async def rollout(started: asyncio.Event) -> None:
        with module.rollout_trace_attr(1, 1, 0):
            await work(started)

    async def main() -> None:
        started = asyncio.Event()
        task = asyncio.create_task(rollout(started))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with tracing(tmp_path / "store"):
        asyncio.run(main())
        found = one(tmp_path / "store")
    assert [span.status for span in found.spans] == ["cancelled", "cancelled"]


def test_the_exception_is_the_same_and_only_ours_is_noted(tmp_path):
    module = ours()
    error = ValueError("no such thing")

    @module.rollout_trace_op
    async def work() -> None:
        raise error

    async def rollout() -> None:
        with module.rollout_trace_attr(1, 1, 0):
            await work()

    with tracing(tmp_path / "store"):
        with pytest.raises(ValueError) as raised:
            asyncio.run(rollout())
        found = one(tmp_path / "store")
    assert raised.value is error
    assert span_of(found, "work").error == "ValueError: no such thing"


def test_what_a_rollout_hands_to_threads_belongs_to_it(tmp_path):
    module = ours()

    @module.rollout_trace_op
    def work(number: int) -> int:
        return number

    async def rollout(sample: int, pool: ThreadPoolExecutor) -> list[int]:
        loop = asyncio.get_running_loop()
        with module.rollout_trace_attr(sample, 1, 0):
            return [
                await loop.run_in_executor(None, work, sample),
                await loop.run_in_executor(pool, functools.partial(work, number=sample)),
                await asyncio.to_thread(work, sample),
            ]

    async def main() -> list[list[int]]:
        with ThreadPoolExecutor(1) as pool:
            return await asyncio.gather(*(rollout(sample, pool) for sample in range(3)))

    with tracing(tmp_path / "store"):
        assert asyncio.run(main()) == [[0] * 3, [1] * 3, [2] * 3]
        found = recorded(tmp_path / "store")
    assert [item.name for item in found] == ["1/0/0", "1/1/0", "1/2/0"]
    for sample, item in enumerate(found):
        assert [span.inputs for span in item.spans[1:]] == [{"number": sample}] * 3


def test_the_generators_of_random_numbers_are_left_alone(tmp_path):
    import numpy as np

    module = ours()

    @module.rollout_trace_op
    def work() -> None:
        pass

    def state() -> Any:
        return random.getstate(), str(np.random.get_state())

    before = state()
    with tracing(tmp_path / "store", most=1):
        for sample in range(20):
            with module.rollout_trace_attr(sample, 1, 0):
                work()
        assert len(recorded(tmp_path / "store")) == 1
    assert state() == before
