"""What goes wrong while recording costs a part of the record, and nothing of the rollout."""

import logging
import typing

import pydantic
import pytest

import trackway
from trackway import llm_trace, reward, rollout_trace, tool_trace, trajectory
from trackway.trace import semconv
from trackway.trace.capture.encode import SpanEncoder
from trackway.trace.testing import recording


class Hostile:
    """Raises wherever a tracer might touch it."""

    def __init__(self):
        object.__setattr__(self, "asked", [])

    def __getattr__(self, name):
        raise RuntimeError(name)

    def __repr__(self):
        raise RuntimeError("repr")

    def __str__(self):
        raise RuntimeError("str")

    def __len__(self):
        raise RuntimeError("len")

    def __eq__(self, other):
        raise RuntimeError("eq")

    def __hash__(self):
        raise RuntimeError("hash")

    def __bool__(self):
        raise RuntimeError("bool")

    def __iter__(self):
        raise RuntimeError("iter")

    def model_dump(self):
        raise RuntimeError("model_dump")

    @property
    def __class__(self):
        raise RuntimeError("class")


class HostileDict(dict):
    def items(self):
        raise RuntimeError("items")

    def __iter__(self):
        raise RuntimeError("iter")

    def keys(self):
        raise RuntimeError("keys")


class HostileMapping(typing.Mapping):
    def __getitem__(self, key):
        raise RuntimeError("getitem")

    def __iter__(self):
        return iter(["a"])

    def __len__(self):
        raise RuntimeError("len")


class HostileNumber(float):
    def __float__(self):
        raise RuntimeError("float")

    def __repr__(self):
        raise RuntimeError("repr")


class HostileModel(pydantic.BaseModel):
    value: int = 1

    def model_dump(self, **_):
        raise RuntimeError("model_dump")

    @property
    def expensive(self):
        raise RuntimeError("property")


@pytest.mark.parametrize("make", [Hostile, HostileDict, HostileMapping, HostileNumber, HostileModel])
def test_an_object_that_raises_at_every_touch_harms_neither_rollout_nor_record(make):
    value = make()

    @tool_trace
    def tool(given):
        return given

    @llm_trace
    def generate(turn):
        return {"token_ids": [turn], "extra": value}

    with recording() as rec:
        with trajectory(step=1, sample_index=1):
            for turn in range(3):
                assert generate(turn)["extra"] is value
                assert tool(value) is value
        found = rec.trajectory()
        assert rec.status().troubles == 0
    assert len(found.spans) == 7
    assert [turn.token_ids for turn in found.turns if turn.role == "assistant"] == [(0,), (1,), (2,)]
    assert {span.status for span in found.spans} == {"ok"}
    for span in found.spans[1:]:
        assert span.kind == "llm" or span.inputs["given"] is not None
        assert span.outputs is not None


class Unreadable(type):
    """A class whose very name cannot be read."""

    @property
    def __module__(cls):
        raise RuntimeError("module")


class FromNowhere(metaclass=Unreadable):
    pass


def test_a_failure_inside_the_recording_costs_only_what_it_hits(swallowing, caplog):
    value = FromNowhere()

    @tool_trace
    def tool(given, x):
        if x == 2:
            raise ValueError("the tool's own")
        return value

    with recording() as rec, caplog.at_level(logging.WARNING, "trackway"):
        with trajectory(step=1, sample_index=1):
            assert tool(value, 1) is value
            with pytest.raises(ValueError, match="the tool's own"):
                tool(value, 2)
            assert tool(value, 3) is value
        found = rec.trajectory()
        status = rec.status()
    assert [span.status for span in found.spans] == ["ok", "ok", "error", "ok"]
    assert found.status == "ok"
    assert status.troubles >= 2
    warnings = [record.getMessage() for record in caplog.records if "tracing problem" in record.getMessage()]
    assert 1 <= len(warnings) <= 2
    assert len(set(warnings)) == len(warnings)
    assert found.notes
    assert all("lost" in note for note in found.notes)


def test_a_reward_that_is_none_is_told_and_not_recorded(swallowing, caplog):
    with recording() as rec:
        with trajectory(step=1, sample_index=1):
            for _ in range(3):
                reward("quality", object())
            reward("exact", 1)
        assert rec.trajectory().rewards == {"exact": 1.0}
        assert rec.status().troubles == 3
    assert [record.getMessage() for record in caplog.records if "'quality'" in record.getMessage()] == [
        "tracing problem (training goes on): reward 'quality' is neither a number nor a text: object: "
        "TypeError: float() argument must be a string or a real number, not 'object'"
    ]


def test_an_odd_name_or_explanation_costs_nothing():
    with recording() as rec:
        with trajectory(step=1, sample_index=1, name=Hostile()):
            reward("a", 1, explanation=Hostile())
            reward("b", 1, explanation={"why": [1, Hostile()]})
            reward("c", 1, explanation=2.5)
            reward(Hostile(), 1)
            llm_trace(lambda: "x", name=7)()
        found = rec.trajectory()
        status = rec.status()
    name = f"<{__name__}.Hostile>"
    assert (found.status, found.spans[0].name, found.spans[1].name) == ("ok", f'"{name}"', "7")
    assert found.rewards == {"a": 1.0, "b": 1.0, "c": 1.0, f'"{name}"': 1.0}
    explained = [event.attributes.get(semconv.EVALUATION_EXPLANATION) for event in found.spans[0].events]
    assert explained == [f'"{name}"', f'{{"why":[1,"{name}"]}}', "2.5", None]
    assert status.dropped == 0 and status.troubles == 0


def test_a_root_span_that_cannot_be_encoded_is_kept_without_its_parts(swallowing, monkeypatch):
    def fails(self, rewards):
        raise RuntimeError("cannot be encoded")

    monkeypatch.setattr(SpanEncoder, "_rewards", fails)
    with recording() as rec:
        with (
            pytest.raises(ValueError, match="own"),
            trajectory(step=1, sample_index="a", name="odd", policy_version=3) as rollout,
        ):
            reward("a", 1)
            raise ValueError("own")
        found = rec.trajectory()
        status = rec.status()
    assert (found.trace_id, str(found.key), found.status) == (rollout.trace_id, "1/a/0", "error")
    assert found.spans[0].name == "odd"
    assert found.spans[0].end_ns > found.spans[0].start_ns
    assert found.notes == ("everything else lost: RuntimeError: cannot be encoded",)
    assert (status.dropped, status.troubles) == (0, 1)


def test_a_tokenizer_that_raises_costs_only_the_text():
    class Broken:
        def decode(self, ids, **options):
            raise RuntimeError("no words")

        def convert_ids_to_tokens(self, ids):
            raise RuntimeError("no tokens")

        def __len__(self):
            return 1000

    @llm_trace
    def generate():
        return {"response_ids": [1, 2, 3]}

    with recording(tokenizer=Broken(), token2text=True) as rec:
        for _ in range(3):
            assert generate() == {"response_ids": [1, 2, 3]}
        spans = rec.spans()
    assert [span.response_ids for span in spans] == [(1, 2, 3)] * 3
    assert all(span.response_text.startswith("⟨decode failed: ") for span in spans)


def test_under_strict_a_failure_is_raised():
    with (
        recording(),
        trajectory(step=1, sample_index=1),
        pytest.raises(RuntimeError, match="neither a number"),
    ):
        reward("quality", object())


# Rollouts without generations


def test_a_rollout_without_a_generation_is_listed_and_told_once(caplog):
    @rollout_trace
    def rollout():
        return "done"

    with recording() as rec:
        for sample in range(3):
            with trajectory(step=1, sample_index=sample):
                rollout()
        with trajectory(step=2, sample_index=0):
            pass
        trajectories = rec.trajectories()
    assert [(item.generations, item.tokens, item.reward) for item in trajectories] == [(0, 0, None)] * 4
    warnings = [record.getMessage() for record in caplog.records if "llm_trace" in record.getMessage()]
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "rollout 1/0/0 ended without a call of a function decorated with @llm_trace"
    )


def test_a_rollout_that_generates_is_not_warned_about(caplog):
    @llm_trace(name="a name of its own")
    def generate():
        return "text"

    @rollout_trace
    def whole():
        return {"prompt_ids": [1], "response_ids": [2], "response_mask": [1]}

    with recording() as rec:
        with trajectory(step=1, sample_index=0):
            generate()
        with trajectory(step=1, sample_index=1):
            whole()
        first, second = rec.trajectories()
    assert first.generations == second.generations == 1
    assert not [record for record in caplog.records if "llm_trace" in record.getMessage()]


def test_what_a_rollout_brings_cannot_forge_or_steer_the_log(swallowing, caplog):
    with recording(), trajectory(step=1, sample_index=1):
        reward("1\n2026-01-01 ERROR trackway: all is lost\x1b[2J\u202e", object())
    (message,) = (found.getMessage() for found in caplog.records if "reward" in found.getMessage())
    assert r"1\n2026-01-01 ERROR trackway: all is lost\x1b[2J\u202e" in message
    assert message.isprintable()


def test_a_program_whose_log_fails_is_recorded_all_the_same(swallowing):
    def refuse(_):
        raise ZeroDivisionError

    log = logging.getLogger("trackway")
    log.addFilter(refuse)
    try:
        with recording() as recorded:
            for number in range(3):
                with trajectory(step=1, sample_index=number):
                    reward("score", object())  # said once
            trackway.flush()
            assert [found.name for found in recorded.trajectories()] == ["1/0/0", "1/1/0", "1/2/0"]
    finally:
        log.removeFilter(refuse)
