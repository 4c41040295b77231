"""Secrets never reach the disk; what only looks a little like one does."""

import json
from dataclasses import dataclass, field

import pytest
from opentelemetry import trace as otel

from trackway import annotate, llm_trace, reward, rollout_trace, tool_trace, trajectory
from trackway.trace.testing import recording


@tool_trace
def passes(value):
    return value


def written(rec):
    rec.status()
    return b"".join(path.read_bytes() for path in (rec.path / "journal").iterdir()).decode()


def kept(value, **config):
    with recording(**config) as rec:
        passes(value)
        (span,) = rec.spans()
    assert json.loads(span.outputs) == span.inputs["value"]
    return span.inputs["value"]


def test_credentials_in_arguments_results_and_errors_are_masked():
    @dataclass
    class Config:
        token: str = "tok-4711-abcdef"
        max_tokens: int = 512
        headers: dict = field(default_factory=lambda: {"x-api-key": "plainsecret", "accept": "text/html"})

    class Session:
        def __init__(self):
            self.token = "tok-0815-ghijkl"

    @tool_trace
    def call(url, api_key, headers, cfg, env, session):
        otel.get_current_span().set_attribute("http.request.header.authorization", "plainsecret")
        otel.get_current_span().set_attribute("http.url", url)
        return {"set-cookie": "plainsecret", "body": f"echo {headers['Authorization']}"}

    @rollout_trace
    def fails(password):
        raise RuntimeError("cannot log in with sk-test-123456789 at https://me:plainsecret@example.org/")

    environ = {
        "OPENAI_API_KEY": "plainsecret",
        "HF_TOKEN": "plainsecret-1",
        "AWS_SECRET_ACCESS_KEY": "plainsecret",
        "GITHUB_TOKEN": "plainsecret-2",
        "DB_PASSWORD": "plainsecret",
        "PATH": "/usr/bin",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with recording() as rec:
        with trajectory(step=1, sample_index=1):
            call(
                "https://api.example.org/v1?user=me&api_key=plainsecret&page=2",
                api_key="sk-test-123456",
                headers={"Authorization": "Bearer tok"},
                cfg=Config(),
                env=environ,
                session=Session(),
            )
            with pytest.raises(RuntimeError):
                fails(password="plainsecret")
            annotate(credentials={"user": "plainsecret"}, api_key="plainsecret", note="Bearer abcdefgh.ijk")
            reward("r", "sk-test-123456789", explanation="hf_plainsecretplainsecret")
        found = rec.trajectory()
        text = written(rec)
    for secret in ("plainsecret", "sk-test", "Bearer tok", "tok-4711", "tok-0815", "abcdefgh.ijk"):
        assert secret not in text
    call_span = next(span for span in found.spans if span.name == "call")
    assert call_span.inputs["env"]["PATH"] == "/usr/bin"
    assert call_span.inputs["env"]["TOKENIZERS_PARALLELISM"] == "false"
    assert call_span.inputs["cfg"]["max_tokens"] == 512
    assert call_span.inputs["cfg"]["headers"]["accept"] == "text/html"
    assert call_span.inputs["url"].startswith("https://api.example.org/v1?user=me&⟨redacted⟩&page=2")
    assert call_span.inputs["api_key"] == "⟨redacted⟩"
    assert call_span.attributes["http.request.header.authorization"] == "⟨redacted⟩"


def test_what_other_instrumentation_put_on_a_span_is_masked_too():
    @rollout_trace
    def fetch():
        span = otel.get_current_span()
        span.set_attribute("http.request.headers", ("Authorization", "Bearer abc.plainsecret"))
        span.add_event("request", {"api_key": "plainsecret", "url": "https://me:plainsecret@example.org/"})
        span.record_exception(ValueError("no access with sk-plainsecret-123456"))
        span.update_name("GET https://me:plainsecret@example.org/")

    with recording() as rec:
        with trajectory(step=1, sample_index=1):
            fetch()
        (span,) = (item for item in rec.spans() if item.kind == "rollout")
        assert "plainsecret" not in written(rec)
    assert span.name == "GET https://⟨redacted⟩@example.org/"
    assert [event.name for event in span.events] == ["request", "exception"]


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "apiKey",
        "openaiApiKey",
        "X-Api-Key",
        "client_secret",
        "accessToken",
        "hf_token",
        "api_key_2",
        "apiKeys",
        "Password",
        "db.password",
        "Authorization",
        "private-key",
        "Cookie",
    ],
)
def test_the_value_of_a_field_with_a_secret_name_is_masked(name):
    assert kept({name: "abc", "beside": "abc"}) == {name: "⟨redacted⟩", "beside": "abc"}


ORDINARY = {
    "max_tokens": 5,
    "token_ids": "listed elsewhere",
    "eos_token": "<|endoftext|>",
    "eos_token_id": 2,
    "pad_token": "<pad>",
    "stop_token_ids": [1, 2],
    "tokens": ["a", "b"],
    "token": "internationalization",
    "num_tokens": "123 tokens",
    "tokenizer": "gpt2",
    "token_type": "BearerToken",
    "author": "somebody",
    "secretary": "Ms. Lee",
    "keyword": "passport",
    "key": "value",
    "public_key": "ssh-ed25519 AAAA",
    "password_length": 12,
    "secret": 42,
    "cookies_eaten": ["chocolate"],
    "task": "the task-force asked sk-8 riders to risk-assess",
    "text": "Basic arithmetic: 1 + 1. The bearer certificate; see https://example.org/a?b=c&keyboard=1",
    "packages": "sk-learn-contrib, hf-internal-testing/llama, task-oriented-dialogue",
    "email": "write to a@b.org: or x:y@z",
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_values_are_left_alone(name):
    value = {name: ORDINARY[name], "beside": "https://x.org token"}
    assert kept(value) == value


def test_token_ids_are_never_taken_for_secrets():
    @llm_trace
    def generate(prompt_ids):
        return {"token_ids": [4, 5, 6], "max_tokens": 3, "logprobs": [-0.5, -0.5, -0.5]}

    with recording(redact=["prompt_ids", "token_ids"]) as rec:
        generate([1, 2, 3])
        (span,) = rec.spans()
    assert (span.prompt_ids, span.response_ids) == ((1, 2, 3), (4, 5, 6))
    assert span.outputs == {"max_tokens": 3}


def test_further_names_can_be_given():
    value = {"accountNo": "DE123", "patient": {"name": "X"}, "patients": 3, "other": "DE123"}
    masked = {"accountNo": "⟨redacted⟩", "patient": "⟨redacted⟩", "patients": 3, "other": "DE123"}
    assert kept(value, redact=["accountNo", "patient"]) == masked
    assert kept(value) == value


SHAPES = {
    "an OpenAI key": "sk-proj-0123456789abcdef",
    "a Hugging Face token": "hf_abcdefghijklmnop",
    "a GitHub token": "ghp_0123456789abcdefghij",
    "a fine-grained GitHub token": "github_pat_0123456789abcdefghij_x",
    "an AWS key": "AKIA0123456789ABCDEF",
    "a bearer": "Bearer abc",
    "a bearer in small letters": "bearer abc.def-ghi",
    "a name and password": "Basic dXNlcjpwYXNz",
    "a JSON web token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
    "a GitLab token": "glpat-0123456789_abcdef",
    "a Slack token": "xoxb-0123456789-abc",
    "a private key": "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAK\n-----END RSA PRIVATE KEY-----",
    "a password in a URL": "//user:hunter2@",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_credential_inside_a_text_is_masked_by_its_shape(shape):
    secret = SHAPES[shape]
    text = f"before https:{secret}host after" if secret.startswith("//") else f"before {secret} after"
    expected = (
        "before https://⟨redacted⟩@host after" if secret.startswith("//") else "before ⟨redacted⟩ after"
    )
    assert kept({"list": [text], "text": text}) == {"list": [expected], "text": expected}
    with recording() as rec:
        passes(text)
        assert rec.spans()[0].outputs == expected
