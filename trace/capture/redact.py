"""Secrets are taken out before anything reaches the disk: by name of the field, by shape of the value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

MASK = "⟨redacted⟩"

_NAMES = (
    r"api[_-]?key|apikey|secret|secrets|client[_-]?secret|secret[_-]?key|password|passwd|pwd|passphrase"
    r"|authorization|proxy[_-]authorization|auth[_-]?token|access[_-]?token|refresh[_-]?token|id[_-]?token"
    r"|bearer[_-]?token|api[_-]?token|hf[_-]?token|hub[_-]?token|github[_-]?token|credentials?"
    r"|private[_-]?key|access[_-]?key(?:[_-]?id)?|cookies?|set[_-]cookie|x[_-]api[_-]key|wandb[_-]?key"
)
# How a credential looks, by the mark that shows where one may begin, and how far before it (or after it,
# where negative) it would. Looked for by marks alone, a text without any costs no regular expression at all:
# these take a tenth of a microsecond for each character, and hold the interpreter's lock meanwhile.
_QUERY_MARKS = ("?", "&")
_SHAPES: tuple[tuple[tuple[str, ...], int, str], ...] = (
    (
        ("sk-",),
        0,
        r"\bsk-(?=[A-Za-z_\-]{0,200}[0-9])[A-Za-z0-9_\-]{8,}",
    ),  # OpenAI, Anthropic; no "sk-learn-contrib"
    (("hf_", "ghp_", "gho_", "ghs_", "ghu_"), 0, r"\b(?:hf|ghp|gho|ghs|ghu)_[A-Za-z0-9]{10,}"),
    (("glpat-", "xox"), 0, r"\b(?:glpat|xox[abprs])-[A-Za-z0-9_\-]{10,}"),
    (("github_pat_",), 0, r"\bgithub_pat_[A-Za-z0-9_]{20,}"),
    (("AKIA",), 0, r"\bAKIA[0-9A-Z]{16}\b"),
    (("Bearer",), 0, r"\bBearer\s+[A-Za-z0-9._~+/\-]{3,}=*"),
    (("bearer",), 0, r"\bbearer\s+(?=\S*[0-9._])[A-Za-z0-9._~+/\-]{8,}=*"),
    (
        ("Basic",),
        0,
        r"\bBasic\s+(?=\S*(?:[0-9=]|[a-z][A-Z]))[A-Za-z0-9+/]{8,}={0,2}",
    ),  # a word is none
    (("eyJ",), 0, r"\beyJ[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]*"),
    (
        ("-----BEGIN ",),
        0,
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)",
    ),
    (("://",), -3, r"[^/\s:@]+:[^/\s@]+(?=@)"),
    (
        _QUERY_MARKS,
        -1,
        r"(?:api[_-]?key|key|token|access_token|auth|password|secret|sig|signature)=[^&\s\"'<>]{6,}",
    ),
)
_QUERY_HINTS = ("key=", "token=", "auth=", "password=", "secret=", "sig=", "signature=")
"""What follows such a mark where it matters: the mark alone stands in every question."""
_NAME_HINTS = (
    *("apikey", "api_key", "api-key", "secret", "passw", "pwd", "passphrase", "authorization", "token"),
    *("credential", "privatekey", "private_key", "private-key", "accesskey", "access_key", "access-key"),
    *("cookie", "wandb"),
)

_MAX_KNOWN = 10_000
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
"""Where one word ends in a name such as openaiApiKey."""


class Redactor:
    """Decides what is a secret.

    Args:
        names: further field names whose values are secrets, compared without regard to case.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        known = "|".join([_NAMES, *(re.escape(name) for name in names)])
        # A name counts at the end of a longer one too, and numbered: OPENAI_API_KEY, x-auth-token, apiKeys2.
        self._name = re.compile(rf"(?:^|.*[_\-. ])(?:{known})s?[_\-]?\d*", re.IGNORECASE)
        # "token" alone also names a piece of text, and eos_token a mark: only what looks like a variable
        # of an environment, or a word with digits or dashes in it, is taken for a credential.
        self._token = re.compile(r"[A-Z0-9_]*_TOKEN|[Tt]oken|TOKEN")
        self._credential = re.compile(r"(?=.*[A-Za-z])(?=.*[0-9\-.:])[A-Za-z0-9._~+/=:\-]{8,}")
        self._known: dict[str, bool] = {}
        self._shapes = [(marks, before, re.compile(shape)) for marks, before, shape in _SHAPES]
        marks = (mark for marks, _, _ in _SHAPES if marks != _QUERY_MARKS for mark in marks)
        hints = (*marks, *_QUERY_HINTS, *_NAME_HINTS, *names)
        self._hints = tuple(dict.fromkeys(hint.lower().encode() for hint in hints))

    def suspects(self, data: bytes) -> bool:
        """Say quickly whether a closer look is worth it."""
        data = data.lower()
        return any(hint in data for hint in self._hints)

    def is_secret_name(self, name: str, value: object) -> bool:
        """Say whether the value of a field must not be shown."""
        if not isinstance(value, (str, bytes, list, dict)) or not value:
            return False  # numbers are counts (max_tokens), not keys
        if self._token.fullmatch(name):
            return isinstance(value, str) and self._credential.fullmatch(value) is not None
        known = self._known.get(name)
        if known is None:
            known = any(self._name.fullmatch(spelling) for spelling in (name, _HUMP.sub("_", name)))
            if len(self._known) < _MAX_KNOWN:
                self._known[name] = known
        return known

    def text(self, text: str) -> str:
        """Mask what looks like a credential inside a text."""
        found = sorted(self._credentials(text))
        if not found:
            return text
        parts: list[str] = []
        end = 0
        for first, last in found:
            if first >= end:
                parts += (text[end:first], MASK)
            end = max(end, last)
        return "".join((*parts, text[end:]))

    def _credentials(self, text: str) -> Iterator[tuple[int, int]]:
        """Give where each of them begins and ends."""
        for marks, before, shape in self._shapes:
            for mark in marks:
                place = text.find(mark)
                while place >= 0:
                    match = shape.match(text, max(0, place - before))
                    if match is not None:
                        yield match.span()
                    place = text.find(mark, max(place + len(mark), match.end() if match else 0))
