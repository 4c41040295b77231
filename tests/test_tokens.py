"""Token ids are found wherever they sit, kept to the last one, and decoded by whoever knows how."""

import asyncio
import functools
import gc
import math
import threading
import weakref
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import attrs
import numpy
import pydantic
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from trackway import annotate, llm_trace, rollout_trace, trajectory
from trackway.trace import semconv
from trackway.trace.testing import recording

VOCABULARY = 50


class Words:
    """A tokenizer in Python: id 7 is ``w7``; it notes the threads that it worked on."""

    def __init__(self, prefix="w"):
        self.prefix = prefix
        self.threads = set()
        self.decoded = 0

    def __len__(self):
        return VOCABULARY

    def convert_ids_to_tokens(self, ids):
        return [f"{self.prefix}{item}" if item < VOCABULARY else None for item in ids]

    def decode(self, ids, skip_special_tokens=False, **options):
        self.threads.add(threading.get_ident())
        self.decoded += len(ids)
        return " ".join(f"{self.prefix}{item}" for item in ids)


# Where ids are found


@dataclass
class Record:
    token_ids: Any
    log_probs: Any = None
    stop_reason: str = "stop"


class Model(pydantic.BaseModel):
    token_ids: list[int]
    log_probs: list[float] | None = None
    stop_reason: str = "stop"


@attrs.frozen
class Frozen:
    token_ids: Any
    log_probs: Any = None
    stop_reason: str = "stop"


@dataclass(slots=True)
class Slots:
    token_ids: Any
    log_probs: Any = None
    stop_reason: str = "stop"


class Plain:
    def __init__(self, token_ids, log_probs=None):
        self.token_ids = token_ids
        self.log_probs = log_probs
        self.stop_reason = "stop"


Row = namedtuple("Row", ["token_ids", "log_probs", "stop_reason"], defaults=[None, "stop"])


def as_dict(token_ids, log_probs=None):
    return {"token_ids": token_ids, "log_probs": log_probs, "stop_reason": "stop"}


IDS, LOGPROBS = [3, 1, 2], [-0.5, -0.25, -1.0]
SHAPES = [as_dict, Record, Model, Frozen, Slots, Plain, Row]


def torch_tensor(values):
    return pytest.importorskip("torch").tensor(values)


SEQUENCES = {
    "list": list,
    "tuple": tuple,
    "numpy": numpy.array,
    "one row of numpy": lambda values: numpy.array([values]),
    "numpy numbers": lambda values: [
        numpy.float32(v) if isinstance(v, float) else numpy.int64(v) for v in values
    ],
    "torch": torch_tensor,
    "one row of torch": lambda values: torch_tensor([values]),
    "torch numbers": lambda values: list(torch_tensor(values)),
}


def check(span, prompt=None):
    assert span.response_ids == tuple(IDS)
    assert span.response_logprobs == tuple(LOGPROBS)
    assert span.prompt_ids == prompt
    assert all(type(item) is int for item in span.response_ids)


@pytest.mark.parametrize("shape", SHAPES)
def test_ids_are_found_in_results_of_any_shape(shape):
    @llm_trace
    def generate():
        return shape(token_ids=IDS, log_probs=LOGPROBS)

    with recording() as rec:
        generate()
        found = rec.trajectory()
    check(found.spans[0])
    assert found.spans[0].outputs == {"stop_reason": "stop"}
    assert found.turns[0].token_ids == tuple(IDS)
    assert found.turns[0].logprobs == tuple(LOGPROBS)


@pytest.mark.parametrize("kind", SEQUENCES)
def test_ids_are_found_in_sequences_of_any_kind(kind):
    make = SEQUENCES[kind]

    @llm_trace
    def generate(prompt_ids):
        return as_dict(make(IDS), make(LOGPROBS))

    with recording() as rec:
        generate(make([1, 2]))
        (span,) = rec.spans()
    check(span, prompt=(1, 2))
    assert span.inputs is None
    assert span.outputs == {"stop_reason": "stop"}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda result: (result, {"elapsed": 1}),
        lambda result: [None, result],
        lambda result: {"outputs": [{"inner": result}]},
        lambda result: SimpleNamespace(request_id="r", outputs=[result]),
        lambda result: {"deep": {"deeper": [[{"deepest": result}]]}},
    ],
    ids=["in a tuple", "in a list", "in a dict", "in an object", "deep"],
)
@pytest.mark.parametrize("shape", [as_dict, Record, Model, Plain])
def test_ids_are_found_inside_of_what_is_returned(wrap, shape):
    @llm_trace
    def generate():
        return wrap(shape(token_ids=IDS, log_probs=LOGPROBS))

    with recording() as rec:
        generate()
        (span,) = rec.spans()
    check(span)
    assert "token_ids" not in str(span.outputs)
    assert "<" not in str(span.outputs)
    assert str(span.outputs).count("stop_reason") == 1


def test_ids_are_found_in_the_outputs_of_an_engine():
    """Objects whose classes declare nothing, which hold the prompt's ids beside a list of completions."""

    class RequestOutput:
        def __init__(self, *outputs, **ids):
            self.request_id = "r"
            self.outputs = list(outputs)
            self.metrics = object()
            vars(self).update(ids)

    @llm_trace
    def generate(result):
        return result

    with recording() as rec:
        generate(RequestOutput(Plain(IDS, LOGPROBS), prompt_token_ids=[1, 2]))
        generate(RequestOutput(Plain(IDS, LOGPROBS)))
        generate(RequestOutput(Plain(IDS, LOGPROBS), Record([9]), prompt_token_ids=[1, 2]))
        generate([RequestOutput(Plain(IDS, LOGPROBS))])
        generate(SimpleNamespace(output_ids=IDS, logprobs=LOGPROBS, request_id="r"))
        one, without_prompt, two, listed, sglang = rec.spans()
    check(one, prompt=(1, 2))
    check(without_prompt)
    check(listed)
    check(sglang)
    assert one.outputs == without_prompt.outputs == listed.outputs[0]
    assert one.outputs == {"request_id": "r", "outputs": [{"stop_reason": "stop"}]}
    assert (two.prompt_ids, two.response_ids) == ((1, 2), None)
    assert [item["token_ids"] for item in two.outputs["outputs"]] == [IDS, [9]]


class Slotted:
    __slots__ = ("_secret", "text", "token_ids", "unset")

    def __init__(self):
        self.token_ids = IDS
        Slotted.text.__set__(self, "hello")
        self._secret = "x"


class Overriding(Slotted):
    __slots__ = ()

    @property
    def text(self):
        raise AssertionError("a property was asked")


def test_ids_in_slots_are_found_past_any_property():
    @llm_trace
    def generate(kind):
        return kind()

    with recording() as rec:
        generate(Slotted)
        generate(Overriding)
        spans = rec.spans()
    assert [span.response_ids for span in spans] == [tuple(IDS)] * 2
    assert [span.outputs for span in spans] == [{"text": "hello"}] * 2


def test_an_object_without_ids_is_not_looked_into_for_long():
    looked = 0

    class Link:
        def __init__(self, depth):
            self.token = "k-1"
            self.children = [Link(depth - 1) for _ in range(8)] if depth else []
            self._last = Plain(IDS)

        def __getattribute__(self, name):
            nonlocal looked
            looked += 1
            return object.__getattribute__(self, name)

    @llm_trace
    def generate(client, *more):
        return "text"

    link = Link(3)
    looked = 0
    with recording() as rec:
        generate(link, {"deep": link})
        (span,) = rec.spans()
    assert looked == 0  # what is read is read past the object's own __getattribute__
    name = f"<{Link.__module__}.{Link.__qualname__}>"
    assert span.inputs == {"client": name, "more": [{"deep": name}]}
    assert span.prompt_ids is span.response_ids is None


def test_numbers_of_numpy_and_torch_between_others_are_numbers():
    torch = pytest.importorskip("torch")

    @llm_trace
    def generate(five):
        return {
            "token_ids": [1, five, True, 2],
            "response_mask": [1, numpy.bool_(True), numpy.int8(0), 1],
            "log_probs": [-0.5, numpy.float64(-0.25), None, 0.0],
        }

    @llm_trace
    def generate_elsewhere():
        return {"token_ids": [1, torch.empty((), device="meta"), 2]}

    with recording() as rec:
        generate(numpy.int64(5))
        generate(torch.tensor(5))
        generate_elsewhere()
        *spans, elsewhere = rec.spans()
    for span in spans:
        assert span.response_ids == (1, 5, 1, 2)
        assert all(type(item) is int for item in span.response_ids)
        assert span.response_mask == (1, 1, 0, 1)
        assert span.response_logprobs[:2] == (-0.5, -0.25)
    assert elsewhere.response_ids == (1, "<torch.Tensor>", 2)


@pytest.mark.parametrize("make", [list, tuple, numpy.array, torch_tensor])
def test_a_list_of_one_row_is_the_row(make):
    @llm_trace
    def generate(prompt_ids):
        return {"deep": {"token_ids": [make(IDS)]}}

    with recording() as rec:
        generate([make([1, 2])])
        (span,) = rec.spans()
    assert span.prompt_ids == (1, 2)
    assert span.response_ids == tuple(IDS)


@pytest.mark.parametrize("make", [list, numpy.array, torch_tensor])
def test_ids_further_inside_stay_whole_however_many(make):
    ids = list(range(300))

    @llm_trace
    def generate():
        return {"output": {"meta": [{"token_ids": make(ids)}], "pixels": numpy.zeros(300)}}

    with recording(max_array_items=100) as rec:
        generate()
        (span,) = rec.spans()
    assert span.response_ids == tuple(ids)
    assert span.outputs["output"]["pixels"]["shape"] == [300]


@pytest.mark.parametrize("make", [list, numpy.array, torch_tensor])
@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: {"output": value}], ids=["top", "deep"])
def test_a_batch_stays_whole_in_the_record_and_makes_no_turn(make, wrap):
    rows = [list(range(200)), list(range(200, 400))]

    @llm_trace
    def as_rows(prompt_ids):
        return wrap({"response_ids": make(rows), "text": "a"})

    @llm_trace
    def as_records():
        return wrap([{"response_ids": make(row), "log_probs": make(row)} for row in rows])

    with recording(max_array_items=100) as rec:
        as_rows(make(rows))
        as_records()
        table, records = rec.trajectories()
    span, other = table.spans[0], records.spans[0]
    assert span.prompt_ids is span.response_ids is other.response_ids is other.response_logprobs is None
    assert span.inputs == {"prompt_ids": rows}
    assert span.outputs == wrap({"response_ids": rows, "text": "a"})
    assert other.outputs == wrap([{"response_ids": row, "log_probs": row} for row in rows])
    assert records.notes == (
        "ids of more than one response in the result: all are kept there, and none as the turn's",
    )
    assert table.notes == (
        "ids of more than one prompt in the arguments: all are kept there, and none as the turn's",
        *records.notes,
    )


def test_ids_in_an_annotation_stay_in_it():
    best = {"token_ids": list(range(200)), "other": {"token_ids": numpy.arange(200)}}
    with recording(max_array_items=100) as rec:
        with trajectory(step=1, sample_index=1):
            annotate(best=best)
        kept = rec.trajectory().annotations["best"]
    assert kept == {"token_ids": list(range(200)), "other": {"token_ids": list(range(200))}}


def test_a_mask_that_is_not_all_ones_and_zeros_costs_nothing_else():
    @llm_trace
    def generate(mask):
        return {"token_ids": IDS, "log_probs": LOGPROBS, "response_mask": mask, "text": "a"}

    with recording() as rec:
        generate([math.nan, 0.5, 1.0])
        generate([None, None, -0.5])
        generate(numpy.array([1.0, 0.0, 1.0]))
        found = rec.trajectories()
    for item in found:
        check(item.spans[0])
        assert item.spans[0].outputs == {"text": "a"}
    assert [item.spans[0].response_mask for item in found] == [(0, 1, 1), (0, 0, 0), (1, 0, 1)]
    assert found[0].notes == ("2 of 3 in the mask are neither 0 nor 1; those above 0 are kept as 1",)
    assert found[2].notes == ()


def test_ids_are_found_in_arguments_by_place_name_and_inside_of_them():
    @llm_trace
    def generate(request, /, prompt_ids=None, **options):
        return "text"

    with recording() as rec:
        generate("r", [1, 2, 3])
        generate("r", prompt_ids=numpy.array([1, 2, 3]))
        generate("r", input_ids=[1, 2, 3])
        generate({"prompt_token_ids": [1, 2, 3], "n": 1})
        spans = rec.spans()
    assert [span.prompt_ids for span in spans] == [(1, 2, 3)] * 4
    assert [span.inputs for span in spans] == [{"request": "r"}] * 3 + [{"request": {"n": 1}}]


def test_the_names_of_the_fields_can_be_given():
    @llm_trace
    def generate(question_tokens):
        return {"answer_tokens": IDS, "confidence": LOGPROBS, "keep": [1, 0, 1], "token_ids": "x"}

    names = {
        "prompt_fields": ["question_tokens"],
        "response_fields": ["answer_tokens"],
        "logprob_fields": ["confidence"],
        "mask_fields": ["keep"],
    }
    with recording(**names) as rec:
        generate([1, 2])
        (span,) = rec.spans()
    check(span, prompt=(1, 2))
    assert span.response_mask == (1, 0, 1)
    assert span.outputs == {"token_ids": "x"}


def test_of_several_results_no_one_makes_the_turn_and_all_stay_in_the_record():
    results = [as_dict([1, 2], [-0.5, -1.0]), as_dict([3, 4]), as_dict([5, 6])]

    @llm_trace
    def generate():
        return results

    @llm_trace
    def generate_many():
        return results * 4

    with recording() as rec:
        generate()
        generate_many()
        few, many = rec.spans()
    assert few.response_ids is many.response_ids is few.response_logprobs is many.response_logprobs is None
    assert few.outputs == results
    assert many.outputs == results * 4


def test_results_that_hold_different_sequences_make_one_turn():
    @llm_trace
    def generate():
        return {"token_ids": IDS}, {"log_probs": LOGPROBS}, {"prompt_ids": [1, 2]}

    with recording() as rec:
        generate()
        (span,) = rec.spans()
    check(span, prompt=(1, 2))


def test_what_only_has_the_name_of_a_sequence_stays_where_it_is():
    value = {
        "token_ids": [[1, 2], [3]],
        "response_ids": "none yet",
        "logprobs": {"content": [{"token": "a", "logprob": -0.5}]},
        "prompt_ids": None,
        "response_mask": 1,
    }

    @llm_trace
    def generate():
        return value

    with recording() as rec:
        generate()
        (span,) = rec.spans()
    assert span.outputs == value
    assert (span.prompt_ids, span.response_ids, span.response_mask) == (None, None, None)


def test_odd_ids_are_kept_as_they_are():
    @llm_trace
    def generate():
        return {
            "token_ids": [15.0, 16.5, True, -100, 2**40, 2**70, None, 3],
            "log_probs": [None, -0.5, "x", 0.0],
        }

    with recording(tokenizer=Words(), token2text=True) as rec:
        generate()
        (span,) = rec.spans()
    assert span.response_ids == (15, 16.5, 1, -100, 2**40, str(2**70), None, 3)
    assert math.isnan(span.response_logprobs[0]) and math.isnan(span.response_logprobs[2])
    assert span.response_text


def test_ids_of_the_result_win_over_others_in_the_arguments_and_it_is_noted():
    @llm_trace
    def generate(prompt_ids):
        return {"prompt_ids": [1, 2, 3], "token_ids": [4]}

    with recording() as rec:
        generate([1, 2, 3])
        generate([1, 2])
        same, other = rec.trajectories()
    assert same.spans[0].prompt_ids == other.spans[0].prompt_ids == (1, 2, 3)
    assert same.notes == ()
    assert other.notes == ("prompt ids of the result are kept, and not the others in the arguments",)


def test_tensors_on_another_device_are_not_waited_for():
    torch = pytest.importorskip("torch")

    @llm_trace
    def generate():
        return {"token_ids": torch.empty(3, device="meta"), "text": "x"}

    with recording() as rec:
        generate()
        (span,) = rec.spans()
    assert span.outputs == {
        "token_ids": {"shape": [3], "dtype": "torch.float32", "device": "meta"},
        "text": "x",
    }


def test_copies_of_ids_are_freed_like_any_other():
    class Result(dict):
        pass

    @llm_trace
    def generate():
        result = Result(token_ids=list(range(1000, 2000)))
        alive.append(weakref.ref(result))
        return result

    alive: list = []
    with recording() as rec:
        for _ in range(100):
            generate()
        assert rec.spans()[99].response_ids == tuple(range(1000, 2000))
        gc.collect()
    assert [item() for item in alive] == [None] * 100


# Whole sequences, whatever the journal stores of them

ids = st.lists(st.integers(0, 5), max_size=12).map(tuple)


@st.composite
def conversations(draw):
    """Prompts and responses of one rollout: continued, cut, edited, repeated, or new."""
    turns = []
    sequence = ()
    for _ in range(draw(st.integers(1, 8))):
        how = draw(st.sampled_from(["continue", "continue", "cut", "edit", "new", "repeat"]))
        if how == "continue":
            prompt = sequence + draw(ids)
        elif how == "cut":
            prompt = sequence[: draw(st.integers(0, len(sequence)))]
        elif how == "edit" and sequence:
            place = draw(st.integers(0, len(sequence) - 1))
            prompt = (*sequence[:place], 9, *sequence[place + 1 :], *draw(ids))
        elif how == "repeat" and turns:
            prompt = draw(st.sampled_from(turns))[0]
        else:
            prompt = draw(ids) * 3
        response = draw(st.none() | ids)
        turns.append((prompt, response))
        sequence = prompt + (response or ())
    whole = draw(st.none() | st.tuples(st.just(turns[0][0]), st.just(sequence[len(turns[0][0]) :])))
    return turns, whole


LONG = tuple(range(40))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(conversations(), min_size=1, max_size=4), st.booleans())
@example([([(LONG, (1,)), ((*LONG, 1, 2), (3,)), (LONG[:20], (4,)), (LONG, None)], (LONG, (1, 2, 3)))], True)
def test_every_sequence_is_read_back_exactly(rollouts, interleaved):
    @llm_trace
    def generate(prompt_ids):
        response = answers.pop(0)
        return "text" if response is None else {"token_ids": response}

    @rollout_trace
    def rollout(turns, whole):
        for prompt, response in turns:
            answers.append(response)
            generate(prompt)
        return whole and {"prompt_ids": whole[0], "response_ids": whole[1]}

    answers: list = []
    with recording() as rec:
        for number, (turns, whole) in enumerate(rollouts):
            with trajectory(step=1, sample_index=number):
                rollout(turns, whole)
        found = rec.trajectories()
    for (turns, whole), item in zip(rollouts, found, strict=True):
        spans = [span for span in item.spans if span.kind == "llm"]
        assert [(span.prompt_ids, span.response_ids) for span in spans] == turns
        outer = item.spans[1]
        assert (outer.prompt_ids, outer.response_ids) == (whole or (None, None))
        assert not any(span.incomplete for span in item.spans)


def test_a_long_rollout_costs_its_tokens_and_not_their_square():
    @llm_trace
    def generate(prompt_ids):
        return {"token_ids": [len(prompt_ids) % 100] * 200}

    def size_of(turns):
        with recording() as rec:
            with trajectory(step=1, sample_index=1):
                sequence = []
                for _ in range(turns):
                    sequence = [*sequence, *generate(sequence)["token_ids"]]
            found = rec.trajectory()
            assert found.spans[-1].prompt_ids == tuple(sequence[:-200])
            return rec.status().bytes

    assert size_of(80) < 4.5 * size_of(20)


# Text


def decoding(**config):
    return recording(token2text=True, **config)


def test_ids_in_the_arguments_are_decoded_too():
    @llm_trace
    def generate(prompt_ids):
        return "plain text"

    with decoding(tokenizer=Words()) as rec:
        generate([1, 2])
        (span,) = rec.spans()
    assert span.prompt_text == "w1 w2"
    assert span.outputs == "plain text"


@pytest.mark.parametrize("shape", SHAPES)
def test_results_of_any_shape_are_decoded(shape):
    @llm_trace
    def generate():
        return shape(token_ids=[3, 4])

    with decoding(tokenizer=Words()) as rec:
        generate()
        found = rec.trajectory()
    assert found.turns[0].text == found.spans[0].response_text == "w3 w4"


class Agent:
    def __init__(self, **attributes):
        vars(self).update(attributes)

    @llm_trace
    async def generate(self, prompt_ids):
        return {"token_ids": [4]}

    @rollout_trace
    async def run(self, server):
        return await server.generate([1, 2])

    @classmethod
    @llm_trace
    def made(cls, prompt_ids):
        return {"token_ids": [4]}

    @llm_trace
    def load_and_generate(self, prompt_ids):
        self.tokenizer = Words("late")
        return {"token_ids": [4]}


def texts(rec):
    return [(span.prompt_text, span.response_text) for span in rec.spans() if span.kind == "llm"]


def test_the_tokenizer_of_the_object_comes_before_the_configured_one():
    with decoding(tokenizer=Words("configured ")) as rec:
        for agent in (
            Agent(tokenizer=Words("own ")),
            Agent(processor=SimpleNamespace(tokenizer=Words("processor's "))),
            Agent(tokenizer=None),
            Agent(),
        ):
            asyncio.run(agent.generate([1]))
        found = texts(rec)
    assert [first for first, _ in found] == ["own 1", "processor's 1", "configured 1", "configured 1"]
    assert [second for _, second in found] == ["own 4", "processor's 4", "configured 4", "configured 4"]


def test_the_object_may_be_a_class_a_callable_or_bound_before():
    class Server:
        tokenizer = Words("class ")

        def __call__(self, prompt_ids):
            return {"token_ids": [4]}

        def generate(self, prompt_ids):
            return {"token_ids": [4]}

        @classmethod
        @llm_trace
        def made(cls, prompt_ids):
            return {"token_ids": [4]}

    with decoding() as rec:
        Server.made([1])
        llm_trace(Server())([1])
        llm_trace(Server().generate)([1])
        llm_trace(functools.partial(Server().generate))([1])
        found = texts(rec)
    assert found == [("class 1", "class 4")] * 4


def test_a_tokenizer_that_is_set_later_is_used_from_then_on():
    agent = Agent(tokenizer=None)
    with decoding() as rec:
        asyncio.run(agent.generate([1]))
        agent.load_and_generate([2])
        asyncio.run(agent.generate([3]))
        found = texts(rec)
    assert found == [(None, None), ("late2", "late4"), ("late3", "late4")]


def test_a_server_without_a_tokenizer_uses_that_of_the_agent_that_called_it():
    with decoding(tokenizer=Words("configured ")) as rec:
        asyncio.run(Agent(tokenizer=Words("agent ")).run(Agent()))
        asyncio.run(Agent(tokenizer=Words("agent ")).run(Agent(tokenizer=Words("server "))))
        found = texts(rec)
    assert found == [("agent 1 agent 2", "agent 4"), ("server 1 server 2", "server 4")]


def test_without_a_tokenizer_one_warning_is_given_and_the_ids_are_kept(caplog):
    with decoding() as rec:
        for _ in range(3):
            asyncio.run(Agent().generate([1]))
        spans = rec.spans()
    assert [(span.prompt_ids, span.response_ids) for span in spans] == [((1,), (4,))] * 3
    assert [span.response_text for span in spans] == [None] * 3
    told = [record.getMessage() for record in caplog.records if "tokenizer" in record.getMessage()]
    assert len(told) == 1
    assert "trackway.configure(tokenizer=...)" in told[0]


def test_a_tokenizer_that_cannot_be_had_is_asked_for_once(caplog, tmp_path):
    path = str(tmp_path / "no" / "tokenizer")
    with decoding() as rec:
        for number in range(5):
            asyncio.run(Agent(tokenizer="".join([path])).generate([number]))
        spans = rec.spans()
    assert [span.prompt_ids for span in spans] == [(number,) for number in range(5)]
    assert all(span.response_text.startswith("⟨decode failed") for span in spans)
    assert len([record for record in caplog.records if "could not be decoded" in record.getMessage()]) == 1


def test_an_object_that_is_no_tokenizer_costs_the_text_and_one_warning(caplog):
    with decoding(tokenizer=Words()) as rec:
        for number in range(3):
            asyncio.run(Agent(tokenizer=SimpleNamespace(encode=len)).generate([number]))
        found = texts(rec)
    assert found == [(f"w{number}", "w4") for number in range(3)]


def test_without_token2text_nothing_is_decoded():
    tokenizer = Words()
    with recording(tokenizer=tokenizer) as rec:
        asyncio.run(Agent(tokenizer=tokenizer).generate([1]))
        assert texts(rec) == [(None, None)]
    assert tokenizer.decoded == 0


def test_ids_that_have_no_text_are_counted():
    @llm_trace
    def generate(prompt_ids):
        return {"token_ids": [5, VOCABULARY + 7, 6, -100]}

    with decoding(tokenizer=Words()) as rec:
        generate([1, 2])
        generate([99, 1, 98])
        first, second = rec.spans()
    assert "⟨57⟩" in first.response_text
    assert first.attributes[semconv.RESPONSE_UNKNOWN] == 1
    assert semconv.PROMPT_UNKNOWN not in first.attributes
    assert second.attributes[semconv.PROMPT_UNKNOWN] == 2


def test_decoding_never_runs_on_the_callers_thread():
    """Slow decoding of many rollouts at once holds up neither the event loop nor its pool of threads."""
    go = threading.Event()

    class Slow(Words):
        def decode(self, ids, **options):
            go.wait(60)
            return super().decode(ids, **options)

    tokenizer = Slow()
    pool_threads = set()

    @llm_trace
    async def generate(prompt_ids):
        await asyncio.sleep(0)
        return {"token_ids": [len(prompt_ids)]}

    async def one(number):
        with trajectory(step=1, sample_index=number):
            await generate([1, 2, 3])

    async def main():
        # All of it ends, and other work in the loop's pool too, while not one sequence has been decoded.
        await asyncio.gather(*(one(number) for number in range(300)))
        loop = asyncio.get_running_loop()
        for _ in range(20):
            pool_threads.add(await loop.run_in_executor(None, threading.get_ident))
        assert tokenizer.decoded == 0
        go.set()

    with decoding(tokenizer=tokenizer) as rec:
        asyncio.run(main())
        found = rec.trajectories()
    assert len(found) == 300
    assert all(item.turns[1].text == "w3" for item in found)
    assert len(tokenizer.threads) == 1
    assert tokenizer.threads.isdisjoint({threading.get_ident(), *pool_threads})


def test_the_called_object_is_let_go_though_its_span_still_waits_for_the_writer():
    go = threading.Event()

    class Slow(Words):
        def decode(self, ids, **options):
            go.wait(60)
            return super().decode(ids, **options)

    configured = Slow()
    with decoding(tokenizer=configured) as rec:
        agent = Agent()
        alive = weakref.ref(agent)
        for _ in range(3):
            asyncio.run(agent.run(Agent()))
        del agent
        gc.collect()
        assert alive() is None
        assert configured.decoded == 0
        go.set()
        assert texts(rec) == [("w1 w2", "w4")] * 3


def test_what_is_not_sampled_is_not_decoded():
    tokenizer = Words()

    @llm_trace
    def generate(prompt_ids):
        return {"token_ids": [1]}

    with decoding(tokenizer=tokenizer, max_samples_per_step_per_worker=2) as rec:
        for sample in range(10):
            with trajectory(step=1, sample_index=sample):
                generate([5, 6])
        assert len(rec.trajectories()) == 2
    # Building a decoder asks the tokenizer for a fixed sample; a rollout needs three ids more.
    before = tokenizer.decoded
    with decoding(tokenizer=tokenizer, ratio=0.0) as rec:
        with trajectory(step=1, sample_index=1):
            generate([5, 6])
        assert rec.trajectories() == []
    assert tokenizer.decoded == before
