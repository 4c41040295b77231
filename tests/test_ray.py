"""Rollouts that cross Ray, with real Ray workers; each program has a network of its own, since Ray listens
on more than the loopback."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from trackway import open_store
from trackway.trace import semconv
from trackway.trace.exporters.sync import is_followed
from trackway.trace.model import Span, Trajectory

from .programs import WINDOW, followers, installed, run, stop_followers, wait_until

pytestmark = pytest.mark.ray

BEGIN = """\
import asyncio, json
import ray
from trackway import inject, reward, tool_trace
from trackway.trace.integrations.ray import runtime_env, traced

@tool_trace
def tool(argument):
    return argument

def start_ray(**settings):
    return ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, **settings)

def answer(**facts):
    print(json.dumps(facts))
"""


def alone() -> list[str]:
    """Give the beginning of a command that runs in a network of its own."""
    if find_spec("ray") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("Ray is not installed")
    script = f'{installed("ip")} link set lo up && exec "$@"'
    return [installed("unshare"), "--net", "--map-root-user", "sh", "-c", script, "sh"]


def run_ray(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end that begins with ``BEGIN``."""
    environment = {
        "TRACKWAY_STRICT": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    } | environment
    done = run(folder, BEGIN + code, timeout=240, before=alone(), **environment)
    assert done.returncode == 0, done.stderr
    return done


def answers_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """Give what a program answered; Ray writes there too."""
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def trajectories(store: Path) -> list[Trajectory]:
    """Give every trajectory of a store, in order of step and sample."""
    opened = open_store(store)
    return [opened.load(summary.trace_id) for summary in opened.query(all_attempts=True)]


def tree(trajectory: Trajectory) -> Counter[tuple[str, str]]:
    """Count the spans by the names of their parent and their own."""
    names = {span.span_id: span.name for span in trajectory.spans}
    return Counter((names[span.parent_id], span.name) for span in trajectory.spans if span.parent_id)


def spans_of(trajectory: Trajectory, name: str) -> list[Span]:
    return [span for span in trajectory.spans if span.name == name]


# One cluster for what can be told from what stays behind


EVERYTHING = """
import os, threading

def plain(number, **keywords):
    return [number, keywords, tool(number)]

same = ray.remote(plain)
task = ray.remote(traced(plain))

@ray.remote
@traced
@tool_trace
def pid_of(number, meeting):
    ray.get(meeting.wait.remote(number))
    return os.getpid()

@ray.remote
class Meeting:  # holds the first two until both are there, so that they run in two processes
    def __init__(self):
        self.present, self.both = set(), asyncio.Event()

    async def wait(self, number):
        self.present.add(number)
        if {0, 1} <= self.present:
            self.both.set()
        if number in (0, 1):
            await self.both.wait()

@ray.remote
@traced
@tool_trace
def around(depth):
    return depth if depth == 0 else ray.get(around.remote(depth - 1))

@ray.remote
@traced
def items(count):
    for number in range(count):
        yield tool(number)

@ray.remote
@traced
def whole_rollout(number):
    with trajectory(step=2, sample_index=number):
        return ray.get(task.remote(number))

class Base:
    def inherited(self, number):
        return tool(number)

@ray.remote
@traced
class Actor(Base):
    def __init__(self):
        tool("constructor")

    @tool_trace
    def method(self, number, /, *, keyword=None):
        return number

    @ray.method(num_returns=2)
    def two(self, number):
        return tool(number), number + 1

    def items(self, count):
        for number in range(count):
            yield tool(number)

    def _private(self, number):
        return self.inherited(number)

    @staticmethod
    def static(number):
        return tool(number)

    @classmethod
    def of_class(cls, number):
        return [cls.__name__, tool(number)]

    def __call__(self, number):
        return tool(number)

@ray.remote
@traced
class Async:
    def __init__(self):
        self.inside = 0
        self.all_are = asyncio.Event()

    async def together(self, number, count):
        self.inside += 1
        if self.inside == count:
            self.all_are.set()
        await self.all_are.wait()
        return tool(number)

    async def items(self, count):
        for number in range(count):
            await asyncio.sleep(0)
            yield tool(number)

    def sync(self, number):
        return tool(number)

@ray.remote(max_concurrency=4, concurrency_groups={"side": 1})
@traced
class Threaded:
    def __init__(self):
        self.barrier = threading.Barrier(4)

    @tool_trace
    def together(self, number):
        self.barrier.wait()
        tool(number)
        return threading.get_ident()

    @ray.method(concurrency_group="side")
    @tool_trace
    def aside(self, number):
        self.barrier.wait()  # for three who wait in the other group
        return number

@ray.remote
@traced
def call_actor(actor, number):
    return ray.get(actor.method.remote(number))

@ray.remote
@traced
@tool_trace
def failing(number):
    raise ValueError(f"no {number}")

def in_rollout(sample, work):
    with trajectory(step=1, sample_index=sample):
        answer(**{sample: work()})

def get(generator):
    return [ray.get(item) for item in generator]

def why(call):
    try:
        return ray.get(call())
    except Exception as error:
        kinds = {cls.__name__ for cls in type(error).__mro__} & {"RayTaskError", "ValueError", "TypeError"}
        return [sorted(kinds), str(getattr(error, "cause", error))]

trackway.configure(store="store", sync="off")
start_ray(runtime_env=runtime_env())
actor, asynchronous, threaded = Actor.options(name="known").remote(), Async.remote(), Threaded.remote()

answer(outside=ray.get([task.remote(1, a=2), same.remote(1, a=2)]))
in_rollout("task", lambda: ray.get([task.remote(1, a=2), task.options(num_cpus=0.5).remote(1, a=2)]))
meeting = Meeting.remote()
in_rollout("processes", lambda: len(set(ray.get([pid_of.remote(n, meeting) for n in range(40)]))))
in_rollout("nested", lambda: ray.get(around.remote(2)))
in_rollout("items", lambda: get(items.remote(3)))
in_rollout("reference", lambda: ray.get(task.remote(ray.put(7), a=ray.get(ray.put(8)))))
in_rollout("own", lambda: ray.get([whole_rollout.remote(n) for n in range(2)]))
in_rollout("method", lambda: ray.get([actor.method.remote(1), actor.method.remote(2, keyword=3)]))
in_rollout("two", lambda: ray.get(actor.two.remote(1)))
in_rollout("actor items", lambda: get(actor.items.remote(3)))
in_rollout("inherited", lambda: ray.get([actor.inherited.remote(1), actor._private.remote(2)]))
kinds = actor.static, actor.of_class, actor.__call__
in_rollout("kinds", lambda: ray.get([kind.remote(n) for n, kind in enumerate(kinds, 1)]))
in_rollout("by name", lambda: ray.get(ray.get_actor("known").method.remote(1)))
in_rollout("handed on", lambda: ray.get(call_actor.remote(actor, 1)))
in_rollout("async", lambda: ray.get([asynchronous.together.remote(n, 8) for n in range(8)]))
in_rollout("async items", lambda: get(asynchronous.items.remote(3)))
in_rollout("async sync", lambda: ray.get(asynchronous.sync.remote(1)))
in_rollout("threads", lambda: len(set(ray.get([threaded.together.remote(n) for n in range(4)]))))
calls = threaded.together, threaded.together, threaded.together, threaded.aside
in_rollout("group", lambda: len(set(ray.get([call.remote(n) for n, call in enumerate(calls)]))))
in_rollout("failing", lambda: why(lambda: failing.remote(1)))
in_rollout("wrong call", lambda: [why(lambda: task.remote()), why(lambda: same.remote())])
lock = threading.Lock()
in_rollout("unserialisable", lambda: [why(lambda: task.remote(lock))[0], why(lambda: same.remote(lock))[0]])

trackway.configure(store="store", sync="off", keep_samples=["kept"], ratio=0)
in_rollout("not sampled", lambda: ray.get([task.remote(1), actor.method.remote(1)]))
in_rollout("kept", lambda: ray.get(task.remote(1)))
ray.shutdown()
"""


Everything = tuple[dict[str, Any], dict[Any, Trajectory], list[Trajectory]]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Everything:
    """Give what the calls returned, the rollouts, both by their sample, and the other traces."""
    folder = tmp_path_factory.mktemp("everything")
    done = run_ray(folder, EVERYTHING)
    answers: dict[str, Any] = {}
    for given in answers_of(done):
        answers |= given
    found = trajectories(folder / "store")
    assert {item.status for item in found} == {"ok"}
    rollouts = {item.key.sample_index: item for item in found if item.key}
    return answers, rollouts, [item for item in found if not item.key]


PLAIN = [1, {"a": 2}, 1]
UNDER_ROOT = {
    # sample: (what came back, names of the spans right below the rollout)
    "task": ([PLAIN, PLAIN], {"tool": 2}),
    "items": ([0, 1, 2], {"tool": 3}),
    "reference": ([7, {"a": 8}, 7], {"tool": 1}),
    "method": ([1, 2], {"method": 2}),
    "two": ([1, 2], {"tool": 1}),
    "actor items": ([0, 1, 2], {"tool": 3}),
    "inherited": ([1, 2], {"tool": 2}),
    "kinds": ([1, ["Actor", 2], 3], {"tool": 3}),
    "by name": (1, {"method": 1}),
    "handed on": (1, {"method": 1}),
    "async": (list(range(8)), {"tool": 8}),
    "async items": ([0, 1, 2], {"tool": 3}),
    "async sync": (1, {"tool": 1}),
    "kept": ([1, {}, 1], {"tool": 1}),
}


@pytest.mark.parametrize("sample", UNDER_ROOT)
def test_what_ray_runs_belongs_to_the_rollout_that_calls_it(everything: Everything, sample: str) -> None:
    answers, rollouts, _ = everything
    result, below = UNDER_ROOT[sample]
    assert answers[sample] == result
    assert tree(rollouts[sample]) == {("trajectory", name): count for name, count in below.items()}


def test_spans_of_many_processes_hang_under_one_rollout(everything: Everything) -> None:
    answers, rollouts, _ = everything
    assert answers["processes"] > 1
    assert tree(rollouts["processes"]) == {("trajectory", "pid_of"): 40}
    spans = spans_of(rollouts["processes"], "pid_of")
    assert {span.resource["process.pid"] for span in spans} == {int(span.outputs) for span in spans}


def test_a_task_that_calls_a_task_is_its_parent(everything: Everything) -> None:
    _, rollouts, _ = everything
    by_depth = {span.inputs["depth"]: span for span in spans_of(rollouts["nested"], "around")}
    assert by_depth[1].parent_id == by_depth[2].span_id
    assert by_depth[0].parent_id == by_depth[1].span_id
    assert by_depth[2].parent_id == rollouts["nested"].spans[0].span_id


def test_a_rollout_that_a_worker_opens_is_its_own(everything: Everything) -> None:
    answers, rollouts, _ = everything
    assert answers["own"] == [[0, {}, 0], [1, {}, 1]]
    assert tree(rollouts["own"]) == {}
    for sample in (0, 1):
        assert rollouts[sample].key.step == 2
        assert tree(rollouts[sample]) == {("trajectory", "tool"): 1}


def test_calls_at_once_in_the_threads_of_an_actor_keep_apart(everything: Everything) -> None:
    answers, rollouts, _ = everything
    assert answers["threads"] == 4
    assert tree(rollouts["threads"]) == {("trajectory", "together"): 4, ("together", "tool"): 4}
    outer = {span.span_id: span.inputs["number"] for span in spans_of(rollouts["threads"], "together")}
    inner = spans_of(rollouts["threads"], "tool")
    assert [outer[span.parent_id] for span in inner] == [span.inputs["argument"] for span in inner]


def test_concurrency_groups_are_kept(everything: Everything) -> None:
    answers, rollouts, _ = everything
    assert answers["group"] == 4
    below = {("trajectory", "together"): 3, ("together", "tool"): 3, ("trajectory", "aside"): 1}
    assert tree(rollouts["group"]) == below


def test_the_function_gets_no_argument_that_was_not_given(everything: Everything) -> None:
    answers, rollouts, _ = everything
    assert answers["outside"] == [PLAIN, PLAIN]
    (span,) = spans_of(rollouts["by name"], "method")
    assert span.inputs == {"number": 1}
    assert [span.inputs for span in spans_of(rollouts["method"], "method")] == [
        {"number": 1},
        {"number": 2, "keyword": 3},
    ]


def test_an_exception_comes_back_as_ray_brings_it_and_is_recorded(everything: Everything) -> None:
    answers, rollouts, _ = everything
    assert answers["failing"] == [["RayTaskError", "ValueError"], "no 1"]
    (span,) = spans_of(rollouts["failing"], "failing")
    assert (span.status, span.error) == ("error", "ValueError: no 1")


def test_what_ray_refuses_it_refuses_in_the_same_words(everything: Everything) -> None:
    answers, rollouts, _ = everything
    traced, same = answers["wrong call"]
    assert traced == same == [["TypeError"], "missing a required argument: 'number'"]
    assert answers["unserialisable"] == [["TypeError"], ["TypeError"]]
    assert tree(rollouts["unserialisable"]) == {}


def test_outside_of_a_rollout_and_where_it_is_not_sampled_nothing_is_carried(everything: Everything) -> None:
    answers, rollouts, others = everything
    assert answers["not sampled"] == [[1, {}, 1], 1]
    assert "not sampled" not in rollouts
    # The two calls from outside, and the actor's constructor.
    assert Counter(item.spans[0].name for item in others) == {"tool": 3}
    assert sorted(str(item.spans[0].inputs["argument"]) for item in others) == ["1", "1", "constructor"]


# Death and retries


RETRIES = """
import os
from pathlib import Path

def first_time(name):
    try:
        os.mkdir(f"{folder}/{name}")
    except FileExistsError:
        return False
    return True

def die_as_soon_as_it_is_seen(name):
    while not any(name in path.read_text() for path in Path(folder, "store/journal").glob("*.open.jsonl")):
        time.sleep(0.05)
    os._exit(1)

@ray.remote(max_retries=1)
@traced
@tool_trace
def dying():
    if first_time("dying"):
        die_as_soon_as_it_is_seen("dying")
    return tool("alive")

@ray.remote(max_retries=2, retry_exceptions=True)
@traced
@tool_trace
def raising():
    if first_time("raising 1") or first_time("raising 2"):
        raise ValueError("once more")
    return tool("well")

@ray.remote(max_task_retries=1)
@traced
class Asynchronous:
    @ray.method(retry_exceptions=True)
    @tool_trace
    async def again(self):
        await asyncio.sleep(0)
        if first_time("again"):
            raise ValueError("once more")
        return tool("asynchronous")

@ray.remote(max_restarts=1, max_task_retries=1)
@traced
class Restarting:
    @tool_trace
    def method(self):
        if first_time("method"):
            die_as_soon_as_it_is_seen("method")
        return tool("restarted")

folder = os.getcwd()
trackway.configure(store="store", sync="off")
start_ray(runtime_env=runtime_env())
actor = Restarting.remote()
asynchronous = Asynchronous.remote()
for number, call in enumerate([dying, raising, actor.method, asynchronous.again]):
    with trajectory(step=1, sample_index=number):
        answer(result=ray.get(call.remote()))
ray.shutdown()
"""


def test_a_task_that_ray_runs_again_is_a_new_attempt_of_the_span(tmp_path: Path) -> None:
    done = run_ray(tmp_path, RETRIES)
    assert [answer["result"] for answer in answers_of(done)] == ["alive", "well", "restarted", "asynchronous"]
    found = trajectories(tmp_path / "store")
    names = ("dying", "raising", "method", "again")
    statuses = (["died", "ok"], ["error", "error", "ok"], ["died", "ok"], ["error", "ok"])
    for trajectory, name, expected in zip(found, names, statuses, strict=True):
        assert trajectory.status == "ok"
        tries = spans_of(trajectory, name)
        assert [span.status for span in tries] == expected
        # Ray does not tell the number to an async method.
        attempts = list(range(len(tries))) if name != "again" else [0, 0]
        assert [span.attributes.get(semconv.RAY_ATTEMPT, 0) for span in tries] == attempts
        assert len({span.span_id for span in tries}) == len(tries)
        assert {span.parent_id for span in tries} == {trajectory.spans[0].span_id}
        (inner,) = spans_of(trajectory, "tool")
        assert inner.parent_id == tries[-1].span_id
        assert inner.attributes.get(semconv.RAY_ATTEMPT, 0) == attempts[-1]


KILLED = """
import os
from itertools import count

@ray.remote
@traced
class Busy:
    def work(self, path, end=None):
        file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for number in count():
            call(number)
            os.write(file, b"%d\\n" % number)
            if number == end:
                os._exit(1)
            time.sleep(0.01)

def lines(path):
    return open(path).read().split() if os.path.exists(path) else []

trackway.configure(store="store", sync="off")
start_ray(runtime_env=runtime_env())
killed, ending = Busy.remote(), Busy.remote()
with trajectory(step=1, sample_index="killed"):
    work = killed.work.remote(os.path.abspath("killed"))
    while len(lines("killed")) < 100:
        time.sleep(0.01)
    ray.kill(killed)
    try:
        ray.get(work)
    except ray.exceptions.RayActorError:
        answer(killed=True)
with trajectory(step=1, sample_index="ended"):
    try:
        ray.get(ending.work.remote(os.path.abspath("ended"), 100))
    except ray.exceptions.RayActorError:
        answer(ended=True)
ray.shutdown()
"""


def test_an_actor_that_is_killed_loses_no_more_than_its_last_moment(tmp_path: Path) -> None:
    done = run_ray(tmp_path, KILLED)
    assert answers_of(done) == [{"killed": True}, {"ended": True}]
    store = open_store(tmp_path / "store")
    for sample in ("killed", "ended"):
        said_to_have_ended = len((tmp_path / sample).read_text().split())
        assert said_to_have_ended >= 100
        rollout = store.load(f"1/{sample}/0")
        numbers = [span.inputs["number"] for span in spans_of(rollout, "call")]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= said_to_have_ended - WINDOW
        assert rollout.status == "ok"
        assert tree(rollout) == {("trajectory", "call"): len(numbers)}
    status = store.status()
    assert status.torn_lines == 0
    assert (status.writers_died, status.writers_alive) == (2, 0)


# Destinations


def in_mlflow(database: Path) -> dict[str, Any]:
    """Give the traces of a database by step, sample and rollout; none may be there twice."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{database}")
    experiment = client.get_experiment_by_name("trackway")
    found = client.search_traces(locations=[experiment.experiment_id], max_results=200)
    names = [tuple(trace.info.tags[tag] for tag in ("step", "sample_index", "rollout_n")) for trace in found]
    assert len(set(names)) == len(names)
    return dict(zip(names, found, strict=True))


ACTORS = """
@ray.remote(num_cpus=0)
@traced
class Worker:
    def __init__(self, number):
        self.number = number

    def rollouts(self):
        for n in range(5):
            with trajectory(step=1, sample_index=self.number, rollout_n=n):
                reward("correct", float(tool(n) == call(n)))

    def help(self):
        return tool(self.number)

trackway.configure(store="store", backend="mlflow")
start_ray(runtime_env=runtime_env())
workers = [Worker.remote(number) for number in range(8)]
ray.get([worker.rollouts.remote() for worker in workers])
with trajectory(step=2, sample_index=0):
    ray.get([worker.help.remote() for worker in workers])
    reward("correct", 1.0)
ray.shutdown()
"""


def test_eight_actors_of_one_store_reach_mlflow_once_each(tmp_path: Path) -> None:
    run_ray(tmp_path, ACTORS)
    store = tmp_path / "store"
    wait_until(lambda: not is_followed(store))
    status = open_store(store).status()
    assert (status.recorded, status.pending, status.dropped) == (8 * 5 * 3 + 9, 0, 0)
    assert len(status.writers) == 9
    traces = in_mlflow(store / "mlflow.db")
    assert len(traces) == 41
    together = traces.pop(("2", "0", "0"))
    assert len(together.data.spans) == 9
    for trace in traces.values():
        assert [span.name for span in trace.data.spans] == ["trajectory", "tool", "call"]
        assert trace.info.state == "OK"
        (feedback,) = [item for item in trace.info.assessments if item.name == "correct"]
        assert feedback.value == 1.0


AT_ONCE = """
@ray.remote
@traced
def task(number):
    return tool(number)

trackway.configure(store="store", backend="mlflow")
start_ray(runtime_env=runtime_env())
with trajectory(step=1, sample_index=1):
    ray.get([task.remote(number) for number in range(40)])
ray.shutdown()
"""


def test_a_driver_that_shuts_ray_down_at_once_leaves_nothing_behind(tmp_path: Path) -> None:
    run_ray(tmp_path, AT_ONCE)
    store = tmp_path / "store"
    wait_until(lambda: not is_followed(store))
    status = open_store(store).status()
    assert (status.recorded, status.exported, status.dropped) == (41, 41, 0)
    (trace,) = in_mlflow(store / "mlflow.db").values()
    assert sorted(span.inputs["argument"] for span in trace.data.spans if span.name == "tool") == list(
        range(40)
    )


ONLY_WORKERS = """
import os

@ray.remote
@traced
class Worker:
    def rollout(self):
        with trajectory(step=1, sample_index=1):
            tool(1)
        return os.getpid()

# Nothing listens there, so the follower goes on trying after all others have gone.
start_ray(runtime_env={"env_vars": {
    "TRACKWAY_STORE": os.path.abspath("store"),
    "TRACKWAY_BACKEND": "mlflow",
    "MLFLOW_TRACKING_URI": "http://127.0.0.1:9",
}})
worker = Worker.remote()
pid = ray.get(worker.rollout.remote())
while not os.path.exists("store/sync.sqlite"):
    time.sleep(0.05)
ray.kill(worker)
while os.path.exists(f"/proc/{pid}"):
    time.sleep(0.05)
# Another one finds a follower at work.
ray.get(Worker.remote().rollout.remote())
ray.shutdown()
answer(network=os.readlink("/proc/self/ns/net"))
"""


def in_network(done: subprocess.CompletedProcess[str]) -> list[int]:
    """Give the processes in the network that a program had for itself."""
    (network,) = [answer["network"] for answer in answers_of(done) if "network" in answer]
    found = []
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        with suppress(OSError):
            if str(path.readlink()) == network:
                found.append(int(path.parts[2]))
    return found


def test_a_follower_outlives_the_worker_that_started_it_and_ray_itself(tmp_path: Path) -> None:
    store = tmp_path / "store"
    try:
        done = run_ray(tmp_path, ONLY_WORKERS)
        (follower,) = followers(store)
        log = (store / "sync.log").read_text()
        assert log.count("trying again") > 0
        # Ray and all of its processes have gone, and nothing waits for the follower.
        wait_until(lambda: in_network(done) == [follower])
    finally:
        stop_followers(store)
    status = open_store(store).status()
    assert (status.recorded, status.pending, status.dropped) == (4, 4, 0)


TWO_NODES = """
import os, subprocess, sys, urllib.request
from ray.cluster_utils import Cluster
from trackway.trace.exporters.sync import is_followed

folder, server = os.getcwd(), None
uri = f"sqlite:///{folder}/shared.db"
if os.environ["PLACE"] == "server":
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--workers", "1"]
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", "5000"],
        env={"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **os.environ},
        stdout=open("server.log", "w"),
        stderr=subprocess.STDOUT,
    )
    uri = "http://127.0.0.1:5000"
    def answers():
        try:
            return urllib.request.urlopen(f"{uri}/health").status == 200
        except OSError:
            return False
    while not answers():
        assert server.poll() is None, open("server.log").read()
        time.sleep(0.1)

class Node:
    def rollouts(self):
        for n in range(4):
            with trajectory(step=1, sample_index=self.name(), rollout_n=n):
                reward("correct", tool(1.0))

    def name(self):
        return os.path.basename(os.environ["TRACKWAY_STORE"])

    @tool_trace
    def outer(self, other):
        reward("judge", 0.5, explanation=self.name())
        return [self.name(), other and ray.get(other.inner.remote())]

    @tool_trace
    def inner(self):
        return self.name()

cluster = Cluster()
for name in ("one", "two"):
    cluster.add_node(num_cpus=2, resources={name: 1}, env_vars={"TRACKWAY_STORE": f"{folder}/{name}"},
                     include_dashboard=False)
trackway.configure(store="one", backend="mlflow", tracking_uri=uri)
settings = runtime_env()["env_vars"]
del settings["TRACKWAY_STORE"]
ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": settings})
remote = ray.remote(traced(Node))
one, two = (remote.options(num_cpus=0.1, resources={name: 0.1}).remote() for name in ("one", "two"))
ray.get([one.rollouts.remote(), two.rollouts.remote()])
for n in range(4):
    with trajectory(step=2, sample_index="both", rollout_n=n):
        assert ray.get([one.inner.remote(), two.outer.remote(one)]) == ["one", ["two", "one"]]
        reward("correct", 1.0)
ray.shutdown()
cluster.shutdown()
trackway.shutdown()
while is_followed(trackway.open_store("one").path) or is_followed(trackway.open_store("two").path):
    time.sleep(0.1)
if server is not None:
    server.terminate()
    server.wait()
"""


@pytest.mark.parametrize("place", ["database", "server"])
def test_two_nodes_with_a_store_each_make_one_trace_of_each_rollout(tmp_path: Path, place: str) -> None:
    run_ray(tmp_path, TWO_NODES, PLACE=place)
    one, two = (open_store(tmp_path / name).status() for name in ("one", "two"))
    assert (one.recorded, two.recorded) == (4 * 2 + 4 * 3, 4 * 2 + 4)
    assert (one.pending, two.pending, one.dropped, two.dropped) == (0, 0, 0, 0)
    traces = in_mlflow(tmp_path / "shared.db")
    assert Counter(name[:2] for name in traces) == {("1", "one"): 4, ("1", "two"): 4, ("2", "both"): 4}
    for (step, *_), trace in traces.items():
        assert trace.info.state == "OK"
        assert trace.info.tags["mlflow.traceName"] == "trajectory"
        rewards = {item.name: (item.value, item.rationale) for item in trace.info.assessments}
        assert rewards["correct"] == (1.0, None)
        assert len(rewards) == len(trace.info.assessments)
        names = {span.span_id: span.name for span in trace.data.spans}
        tree = Counter((names.get(span.parent_id), span.name) for span in trace.data.spans)
        if step == "1":
            assert tree == {(None, "trajectory"): 1, ("trajectory", "tool"): 1}
        else:
            assert rewards["judge"] == (0.5, "two")
            below = {("trajectory", "inner"): 1, ("trajectory", "outer"): 1, ("outer", "inner"): 1}
            assert tree == {(None, "trajectory"): 1, **below}
    parts = [item for item in trajectories(tmp_path / "two") if item.key.step == 2]
    assert [(item.status, [span.name for span in item.spans]) for item in parts] == [("ok", ["outer"])] * 4
    assert {item.rewards["judge"] for item in parts} == {0.5}
    assert all("begun on another machine" in item.notes[0] for item in parts)


def test_the_page_about_ray_says_what_works(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "ray.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    run_ray(tmp_path, f"{code}\nray.shutdown()\n", TRACKWAY_SYNC="off")
    (found,) = trajectories(tmp_path / "trackway-store")
    assert tree(found) == {("trajectory", "search"): 1, ("trajectory", "Policy.generate"): 1}
    assert found.rewards == {"correct": 1.0}
