"""Whatever a function is given or returns is kept as valid JSON, and harms nothing on the way."""

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import gc
import io
import json
import math
import pathlib
import re
import threading
import uuid
import weakref
from typing import Any

import attrs
import numpy
import orjson
import pydantic
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import trackway
from trackway import annotate, llm_trace, rollout_trace, tool_trace, trajectory
from trackway.trace.capture.payload import PayloadFormat
from trackway.trace.config import TraceConfig
from trackway.trace.testing import recording


@rollout_trace
def passes(value):
    return value


def strict(text):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def lines_of(rec):
    for path in sorted((rec.path / "journal").glob("*.jsonl")):
        for line in path.read_bytes().decode("utf-8", "strict").split("\n")[:-1]:
            orjson.loads(line)
            yield strict(line)


def recorded(*values, **config):
    """Give what is kept of values, each once as an argument and once as a result."""
    with recording(**config) as rec:
        for value in values:
            assert passes(value) is value
        spans = rec.spans()
        assert list(lines_of(rec))
        assert rec.status().troubles == 0
    assert len(spans) == len(values)
    for span in spans:
        assert span.status == "ok"
        assert orjson.dumps(span.inputs["value"]) == orjson.dumps(span.outputs)
    return [span.outputs for span in spans]


def one(value, **config):
    (kept,) = recorded(value, **config)
    return kept


# Plain JSON comes back as it was

SPECIAL = re.compile(
    "key|token|secret|pass|pwd|auth|cookie|credential|sk-|earer|basic|://|eyj|wandb|base64|logprobs|_ids|u0000",
    re.IGNORECASE,
)
"""What may be taken for a secret, an image or a token sequence, and NUL; other tests are about those."""
NAMES = st.text(max_size=8)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=25,
)
QUICK = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


def same(one, other):
    """Compare with types: 1, 1.0 and True are three values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return (
        one == other and math.copysign(1, one) == math.copysign(1, other)
        if type(one) is float
        else one == other
    )


@QUICK
@given(st.lists(PLAIN, min_size=1, max_size=20))
def test_plain_json_comes_back_exactly(values):
    assume(not SPECIAL.search(json.dumps(values)))
    kept = recorded(*values)
    assert all(map(same, kept, values))


# Anything else comes back as something


class Colour(enum.Enum):
    RED = "red"
    GREEN = (1, 2)


class Level(enum.IntEnum):
    HIGH = 3


class OddText(str):
    pass


class OddNumber(int):
    pass


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = None


class Thing:
    def __init__(self, value):
        self.value = value


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters()),
    st.text(st.characters(categories=["Cs", "Cc", "L"])),
    st.binary(max_size=20),
    st.binary(max_size=20).map(bytearray),
    st.complex_numbers(),
    st.decimals(),
    st.fractions(),
    st.uuids(),
    st.dates(),
    st.datetimes(),
    st.times(),
    st.timedeltas(),
    st.sampled_from([*Colour, *Level, object(), Thing(1), len, Thing, threading.Lock(), range(3), Ellipsis]),
    st.text().map(OddText),
    st.integers().map(OddNumber),
    st.integers(-(2**31), 2**31 - 1).map(numpy.int64),
    st.floats(width=32).map(numpy.float32),
    st.lists(st.floats(), max_size=4).map(numpy.array),
    st.lists(st.integers(0, 5), max_size=4).map(lambda items: array.array("q", items)),
    st.frozensets(st.integers() | st.text(), max_size=4),
    st.sampled_from([ValueError("x\ud800"), KeyError(), pathlib.Path("a/b")]),
)
KEYS = st.one_of(
    st.text(st.characters(), max_size=5),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.tuples(st.integers(), st.text()),
    st.uuids(),
    st.sampled_from([Colour.RED, Level.HIGH]),
    st.binary(max_size=3),
)
ANYTHING = st.recursive(
    ODD,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.text(), inner, max_size=4).map(collections.OrderedDict),
        st.lists(inner, max_size=4).map(collections.deque),
        st.builds(Point, inner, inner),
        st.builds(Thing, inner),
        st.sets(st.integers(), max_size=3),
    ),
    max_leaves=15,
)


@QUICK
@given(st.lists(ANYTHING, min_size=1, max_size=20))
def test_anything_at_all_becomes_valid_json(values):
    recorded(*values)


@QUICK
@given(st.dictionaries(KEYS, st.integers(0, 9), max_size=6))
def test_no_entry_of_a_dict_is_lost_to_its_key(mapping):
    assert list(one(mapping).values()) == list(mapping.values())


# Cycles and depth


def test_what_holds_itself_is_marked_where_it_comes_back():
    mapping: dict = {"name": "d"}
    mapping["self"] = mapping
    items: list = [1]
    items.append(items)
    point = Point(1)
    point.y = {"up": point}

    class Node(pydantic.BaseModel):
        name: str
        parent: Any = None
        children: list[Any] = []

    node = Node(name="parent")
    node.children.append(Node(name="child", parent=node))
    assert recorded(mapping, items, point, node) == [
        {"name": "d", "self": "<cycle>"},
        [1, "<cycle>"],
        {"x": 1, "y": {"up": "<cycle>"}},
        {
            "name": "parent",
            "parent": None,
            "children": [{"name": "child", "parent": "<cycle>", "children": []}],
        },
    ]


def test_the_same_value_twice_is_no_cycle():
    shared = {"a": 1}
    assert one({"one": shared, "two": [shared], (3,): shared}) == {
        "one": shared,
        "two": [shared],
        "(3)": shared,
    }


def test_objects_that_hold_each_other_are_named_and_left_alone():
    first, second = Thing(None), Thing(None)
    first.value, second.value = second, first
    assert one({"thing": first}) == {"thing": f"<{__name__}.Thing>"}


def test_nesting_without_end_is_cut():
    deep: list = []
    for _ in range(10_000):
        deep = [deep]
    with recording() as rec:
        passes({"deep": deep, "beside": 1})
        passes(deep)
        first, second = rec.spans()
    for kept in (first.inputs["value"], first.outputs):
        assert kept["beside"] == 1
        assert "<nested too deeply>" in json.dumps(kept)
    assert json.dumps(second.outputs).endswith('["<nested too deeply>"' + "]" * 101)


# Numbers


def test_numbers_of_numpy_stay_numbers():
    value = {
        "ok": numpy.bool_(True),
        "n": numpy.int64(3),
        "r": numpy.float32(0.5),
        "z": numpy.array(2),
        "v": numpy.arange(3),
        "m": numpy.ones((2, 2), dtype=numpy.int8),
        "o": numpy.array(["a", None], dtype=object),
        "half": numpy.float16(0.5),
        "long": numpy.longdouble(0.5),
        "when": numpy.datetime64("2026-01-02T03:04:05.000000006"),
        "text": numpy.str_("s"),
        "empty": numpy.array([]),
    }
    assert same(
        one(value),
        {
            "ok": True,
            "n": 3,
            "r": 0.5,
            "z": 2,
            "v": [0, 1, 2],
            "m": [[1, 1], [1, 1]],
            "o": ["a", None],
            "half": 0.5,
            "long": 0.5,
            "when": "2026-01-02T03:04:05.000000006",
            "text": "s",
            "empty": [],
        },
    )
    assert same(recorded(numpy.float64(0.5), numpy.int32(3), numpy.array([True])), [0.5, 3, [True]])


def test_numbers_of_torch_stay_numbers():
    torch = pytest.importorskip("torch")
    value = {
        "ok": torch.tensor(True),
        "n": torch.tensor(3),
        "v": torch.arange(3),
        "r": torch.tensor([0.5], dtype=torch.bfloat16, requires_grad=True),
        "shape": torch.Size([2, 3]),
        "none": torch.empty(0),
        "meta": torch.empty(3, 4, device="meta"),
    }
    kept = one(value)
    assert kept.pop("meta") == {"shape": [3, 4], "dtype": "torch.float32", "device": "meta"}
    assert same(kept, {"ok": True, "n": 3, "v": [0, 1, 2], "r": [0.5], "shape": [2, 3], "none": []})


def test_what_is_no_number_of_json_becomes_null():
    value = {
        "reward": math.nan,
        "logprobs": [-0.5, -math.inf, [numpy.float32("inf")]],
        math.nan: 1,
        math.inf: 2,
        "beside": 1,
    }
    assert one(value) == {
        "reward": None,
        "logprobs": [-0.5, None, [None]],
        "nan": 1,
        "inf": 2,
        "beside": 1,
    }
    assert recorded(math.nan, -math.inf, numpy.float64("nan")) == [None, None, None]


def test_large_integers_are_kept_to_the_digit():
    assert one([2**64 - 1, 2**64, -(2**63) - 1, 10**30]) == [
        2**64 - 1,
        "18446744073709551616",
        "-9223372036854775809",
        str(10**30),
    ]
    assert recorded(2**80, -(2**80)) == [str(2**80), str(-(2**80))]


def test_large_arrays_are_summed_up():
    value = {
        "matrix": numpy.zeros((4096, 4096), dtype=numpy.float32),
        "list": list(range(200_000)),
        "words": ["w"] * 20,
        "exactly": list(range(10_000)),
    }
    with recording() as rec:
        for _ in range(10):
            passes(value)
        kept = rec.spans()[0].outputs
        size = rec.status().bytes
    edges = [*range(8)], [*range(199_992, 200_000)]
    assert kept["list"] == {"length": 200_000, "first": edges[0], "last": edges[1]}
    assert kept["matrix"] == {
        "shape": [4096, 4096],
        "dtype": "float32",
        "first": [0.0] * 8,
        "last": [0.0] * 8,
    }
    assert kept["words"] == ["w"] * 20
    assert kept["exactly"] == list(range(10_000))
    assert size < 10 * 2 * 100_000
    assert one(numpy.arange(11), max_array_items=10)["shape"] == [11]
    assert one(numpy.arange(10), max_array_items=10) == list(range(10))


def test_only_what_may_hold_a_long_array_is_walked():
    payload = PayloadFormat(TraceConfig(max_array_items=100), {"token_ids": "response"}, lambda: None)
    plain = orjson.dumps({"text": "one two three " * 1000, "list": list(range(90))})
    assert isinstance(payload.value(plain), orjson.Fragment)
    assert payload.value(orjson.dumps({"list": list(range(101))}))["list"]["length"] == 101


def test_token_ids_are_kept_whole_however_many():
    @llm_trace
    def generate(prompt_ids):
        return {"token_ids": list(range(200_000)), "log_probs": [-0.5] * 200_000}

    with recording() as rec:
        generate(numpy.arange(100_000))
        (span,) = rec.spans()
    assert span.prompt_ids == tuple(range(100_000))
    assert span.response_ids == tuple(range(200_000))
    assert span.response_logprobs == (-0.5,) * 200_000


# Texts


def test_broken_text_costs_only_itself():
    @tool_trace
    def tool(number):
        if number == 25:
            return "ok \ud83e and\x00more"
        if number == 26:
            return {"k\x00": b"\xff\xfe".decode("utf-8", "surrogateescape"), "raw": b"\xff", "\ud800": 1}
        if number == 27:
            raise ValueError("bad\x00 \ud800 message")
        return "healthy"

    with recording() as rec:
        with trajectory(step=1, sample_index="\ud800\x00", experiment="\ud801"):
            for number in range(51):
                if number == 27:
                    with pytest.raises(ValueError, match="bad"):
                        tool(number)
                else:
                    tool(number)
            annotate(**{"\ud800\x00": "\udfff\x00"})
        found = rec.trajectory()
        journal = b"".join(path.read_bytes() for path in (rec.path / "journal").glob("*.jsonl"))
    tools = [span for span in found.spans if span.kind == "tool"]
    assert len(tools) == 51
    assert [span.outputs for span in tools].count("healthy") == 48
    assert tools[25].outputs == "ok \\ud83e and␀more"
    assert json.loads(tools[26].outputs) == {
        "k␀": "\\udcff\\udcfe",
        "raw": {"bytes": 1, "base64": "/w=="},
        "\\ud800": 1,
    }
    assert tools[27].error == "ValueError: bad␀ \\ud800 message"
    assert found.key.sample_index == "\\ud800␀"
    assert found.experiment == "\\ud801"
    assert found.annotations == {"\\ud800␀": "\\udfff␀"}
    journal.decode("utf-8", "strict")
    assert b"\\u0000" not in journal and b"\x00" not in journal


def test_nul_is_made_visible_in_values_and_keys():
    value = {"file": "a\x00b", "k\x00": ["\x00", 1], "inner": {"x": "\x00"}}
    assert one(value) == {"file": "a␀b", "k␀": ["␀", 1], "inner": {"x": "␀"}}


def test_bytes_are_shown_by_length_and_beginning():
    kept = one({"file": bytes(range(256)) * 100, "view": memoryview(b"abc"), "array": bytearray(b"x")})
    assert kept["file"]["bytes"] == 25_600
    assert len(kept["file"]["base64"]) < 100
    assert kept["view"] == {"bytes": 3, "base64": "YWJj"}
    assert kept["array"] == {"bytes": 1, "base64": "eA=="}


def test_chinese_stands_there_as_it_is_read():
    text = "今天的天气很好，我们去公园散步吧。" * 200

    @llm_trace
    def answer():
        return {"content": text}

    with recording() as rec:
        answer()
        rec.status()
        journal = b"".join(path.read_bytes() for path in (rec.path / "journal").glob("*.jsonl"))
    assert text.encode() in journal
    assert len(journal) < 1.2 * len(text.encode()) + 2000


@pytest.mark.parametrize("limit", [1, 7, 40, 250])
def test_a_long_text_is_cut_inside_its_value_and_not_inside_the_json(limit):
    family = "👩‍👩‍👧‍👦"
    value = {
        "long": "x" * 10_000,
        "chinese": "你好世界" * 100,
        "emoji": family * 100,
        "quotes": '"\\é\n' * 100,
        "short": "",
        "inner": [{"long": "y" * 1000}],
    }
    kept = one(value, max_text_length=limit)
    texts = [kept[name] for name in ("long", "chinese", "emoji", "quotes")] + [kept["inner"][0]["long"]]
    assert all(len(text) <= limit for text in texts)
    assert kept["short"] == ""
    if limit >= 40:
        assert all("characters hidden" in text for text in texts)
    shown = re.sub("⟨.*⟩|…", "", kept["emoji"])
    assert not shown.replace(family, "")


def test_a_text_of_just_the_limit_stays():
    assert one("x" * 100, max_text_length=100) == "x" * 100
    assert one({"a": "x" * 101}, max_text_length=100)["a"].count("x") < 100
    assert one({"a": "x" * 200_000}, max_text_length=None)["a"] == "x" * 200_000


# Keys


def test_keys_that_json_does_not_know_become_text_and_none_is_lost():
    name = uuid.uuid4()
    assert recorded(
        {(1, 2): "a"},
        {(1, 2): "a", "(1, 2)": "b"},
        {None: 1, True: 2, 3: 3, "null": 4},
        {name: 1},
        {Colour.RED: 1},
        {Thing(1): 1, Thing(2): 2},
        {"nested": {"deeper": [{1: {b"x": 1.5}}]}},
        {1: "int", "1": "text", 1.5: "float", frozenset([1]): "set"},
    ) == [
        {"(1, 2)": "a"},
        {"(1, 2)": "a", "(1, 2) (str)": "b"},
        {"null": 1, "true": 2, "3": 3, "null (str)": 4},
        {str(name): 1},
        {"red": 1},
        {f"<{__name__}.Thing>": 1, f"<{__name__}.Thing> (Thing)": 2},
        {"nested": {"deeper": [{"1": {"b'x'": 1.5}}]}},
        {"1": "int", "1 (str)": "text", "1.5": "float", "<builtins.frozenset>": "set"},
    ]


def test_odd_keys_in_a_model_are_kept():
    class Model(pydantic.BaseModel):
        scores: dict[Any, Any]

    assert one(Model(scores={(1, 2): {Level.HIGH: 0.5}})) == {"scores": {"(1, 2)": {"3": 0.5}}}


# Structures


class Inner(pydantic.BaseModel):
    value: int = 1


class Settings(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True, extra="allow")
    inner: Inner = Inner()
    hidden: pydantic.SecretStr = pydantic.SecretStr("hunter2")
    thing: Thing = Thing(1)
    when: datetime.datetime = datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc)


@dataclasses.dataclass(slots=True)
class Slotted:
    a: int = 1
    inner: Inner = dataclasses.field(default_factory=Inner)


@attrs.define
class Attrs:
    a: int = 1
    b: list = attrs.Factory(lambda: [Slotted()])


Pair = collections.namedtuple("Pair", ["left", "right"])


def test_structured_objects_keep_their_fields():
    assert one({"settings": Settings(more=2)}) == {
        "settings": {
            "inner": {"value": 1},
            "hidden": "**********",
            "thing": f"<{__name__}.Thing>",
            "when": "2026-01-02T00:00:00+00:00",
            "more": 2,
        }
    }
    assert recorded(Attrs(), Pair(1, Slotted()), Point(Level.HIGH, {1: datetime.date(2026, 1, 2)})) == [
        {"a": 1, "b": [{"a": 1, "inner": {"value": 1}}]},
        {"left": 1, "right": {"a": 1, "inner": {"value": 1}}},
        {"x": 3, "y": {"1": "2026-01-02"}},
    ]


def test_values_of_the_standard_library_are_readable():
    value = {
        "path": pathlib.PurePosixPath("a/b"),
        "decimal": decimal.Decimal("1.10"),
        "uuid": uuid.UUID(int=1),
        "set": {3, 1, 2},
        "frozen": frozenset("ba"),
        "mixed": {1, "a", None},
        "error": ValueError("went wrong"),
        "enum": Colour.RED,
        "delta": datetime.timedelta(minutes=1),
        "time": datetime.time(1, 2, 3),
        "range": range(3),
        "deque": collections.deque([1, 2]),
        "default": collections.defaultdict(list, a=[1]),
        "counter": collections.Counter("aab"),
        "chain": collections.ChainMap({"a": 1}, {"b": 2}),
        "complex": 1 + 2j,
        "fraction": fractions.Fraction(1, 3),
        "tuple": (1, (2,)),
    }
    kept = one(value)
    assert kept.pop("mixed") == one({"mixed": {None, "a", 1}})["mixed"]
    assert kept == {
        "path": "a/b",
        "decimal": "1.10",
        "uuid": "00000000-0000-0000-0000-000000000001",
        "set": [1, 2, 3],
        "frozen": ["a", "b"],
        "error": {"type": "ValueError", "message": "went wrong"},
        "enum": "red",
        "delta": 60.0,
        "time": "01:02:03",
        "range": [0, 1, 2],
        "deque": [1, 2],
        "default": {"a": [1]},
        "counter": {"a": 2, "b": 1},
        "chain": {"b": 2, "a": 1},
        "complex": "(1+2j)",
        "fraction": "1/3",
        "tuple": [1, [2]],
    }


# Clients, sessions and other things with a life of their own


touched = []


class Client:
    """Its every attribute would do something."""

    def __init__(self):
        self.lock = threading.Lock()
        self.token = "sk-0123456789abcdef"
        self.response_ids_ready = False

    @property
    def response_ids(self):
        touched.append("response_ids")
        threading.Event().wait(5)

    @property
    def tokenizer(self):
        touched.append("tokenizer")
        raise RuntimeError

    def __getattr__(self, name):
        touched.append(name)
        raise RuntimeError(name)

    def __repr__(self):
        touched.append("repr")
        return self.token

    def __len__(self):
        touched.append("len")
        return 0

    @rollout_trace
    def use(self, other):
        return other


class SlottedClient(Client):
    __slots__ = ("session",)


def test_an_object_that_is_no_data_is_named_and_never_asked(caplog):
    touched.clear()
    client, other = Client(), SlottedClient()
    with recording(token2text=True) as rec:
        assert client.use(other) is other
        assert client.use(client) is client
        assert passes({"clients": [client, other]})["clients"][0] is client
        spans = rec.spans()
        journal = b"".join(path.read_bytes() for path in (rec.path / "journal").glob("*.jsonl"))
    assert touched == []
    assert [span.outputs for span in spans] == [
        f"<{__name__}.SlottedClient>",
        f"<{__name__}.Client>",
        {"clients": [f"<{__name__}.Client>", f"<{__name__}.SlottedClient>"]},
    ]
    assert b"sk-0123" not in journal
    assert not [record for record in caplog.records if "tracing problem" in record.getMessage()]


def test_functions_generators_and_locks_are_named():
    kept = one({"f": len, "g": (x for x in ()), "l": threading.Lock(), "m": json, "c": Thing, "o": object()})
    assert kept == {
        "f": "<builtins.builtin_function_or_method>",
        "g": "<builtins.generator>",
        "l": "<_thread.lock>",
        "m": "<builtins.module>",
        "c": "<builtins.type>",
        "o": "<builtins.object>",
    }


def test_arrays_and_objects_are_let_go_once_they_are_written():
    with recording() as rec:
        alive = []
        for _ in range(50):
            big = numpy.zeros(2_000_000)
            passes({"array": big, "thing": Thing(big)})
            alive.append(weakref.ref(big))
        del big
        rec.status()
        gc.collect()
        assert [item() for item in alive] == [None] * 50


# Images


def picture(size=(64, 48), colour=(1, 2, 3)):
    image = pytest.importorskip("PIL.Image")
    return image.new("RGB", size, colour)


def test_an_image_is_told_by_size_and_hash():
    first, again, other = picture(), picture(), picture(colour=(9, 9, 9))
    kept = [item["image"] for item in recorded(first, again, other)]
    assert [(item["mode"], item["size"], len(item["sha256"])) for item in kept] == [("RGB", [64, 48], 16)] * 3
    assert kept[0] == kept[1] != kept[2]


def test_an_image_that_is_not_read_yet_is_left_unread():
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    picture().save(file, "PNG")
    opened = image.open(file)
    file.close()
    assert one({"screen": opened})["screen"] == {"image": {"mode": "RGB", "size": [64, 48]}}
    with pytest.raises(ValueError, match="closed file"):
        opened.load()


def test_the_same_data_url_in_every_turn_costs_next_to_nothing():
    url = "data:image/png;base64," + "iVBORw0KGgo" * 200_000
    message = {
        "role": "user",
        "content": [
            {"type": "text", "text": f"Look: ![picture]({url}) and tell."},
            {"type": "image_url", "image_url": {"url": url}},
        ],
    }

    @llm_trace
    def answer(messages):
        return "a cat"

    with recording() as rec:
        for rollout in range(2):
            with trajectory(step=1, sample_index=1, rollout_n=rollout):
                for _ in range(3):
                    answer([message])
        found = rec.trajectories()
        size = rec.status().bytes
    text, picture_part = found[0].spans[1].inputs["messages"][0]["content"]
    short = picture_part["image_url"]["url"]
    assert short.startswith("data:image/png;base64,⟨2200000 characters, sha256 ")
    assert text["text"] == f"Look: ![picture]({short}) and tell."
    assert size < 20_000
    assert message["content"][1]["image_url"]["url"] == url


def test_a_short_data_url_stays():
    url = "data:image/gif;base64,R0lGODlhAQABAAAAACw="
    assert one({"url": url}) == {"url": url}


# One episode, two ways to tell it


def test_an_episode_leaves_the_same_attributes_however_its_output_is_shaped():
    @dataclasses.dataclass
    class Output:
        prompt_ids: list[int]
        response_ids: list[int]
        response_mask: list[int]
        response_logprobs: list[float]
        num_turns: int
        extra_fields: dict[str, Any]

    @rollout_trace
    def as_object():
        return Output(**facts)

    @rollout_trace
    def as_dict():
        return dict(facts)

    @rollout_trace
    def as_pair():
        return {"num_turns": 2, "extra_fields": facts["extra_fields"]}, {
            name: facts[name] for name in list(facts)[:4]
        }

    facts = {
        "prompt_ids": [1, 2, 3],
        "response_ids": [4, 5, 6],
        "response_mask": [1, 0, 1],
        "response_logprobs": [-0.5, 0.0, -0.25],
        "num_turns": 2,
        "extra_fields": {"reward_extra_info": {"acc": 1.0}},
    }
    with recording() as rec:
        for number, fn in enumerate((as_object, as_dict, as_pair)):
            with trajectory(step=1, sample_index=1, rollout_n=number):
                fn()
        first, second, third = (item.spans[1] for item in rec.trajectories())
    assert first.attributes.keys() == second.attributes.keys() == third.attributes.keys()
    assert first.outputs == second.outputs == {"num_turns": 2, "extra_fields": facts["extra_fields"]}
    assert third.outputs == [first.outputs, {}]
    for span in (first, second, third):
        assert (span.prompt_ids, span.response_ids) == ((1, 2, 3), (4, 5, 6))
        assert (span.response_mask, span.response_logprobs) == ((1, 0, 1), (-0.5, 0.0, -0.25))
        assert span.resource["trackway.schema"] == 1


def test_the_public_names_are_there():
    assert {"rollout_trace", "trajectory", "inject", "extract"} <= set(trackway.__all__)
