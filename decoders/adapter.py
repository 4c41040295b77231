"""One way to ask the many kinds of tokenizer for the little that decoding needs."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import dataclass
from typing import Any, Literal

_MAY_PAD = re.compile(r"pad|eos|eot|end.?of|im_end|</s>", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the texts of tokens make the text of a sequence.

    Attributes:
        byte_level: a token is a string over GPT-2's alphabet of 256 characters, one for each byte.
        space: the character that stands for a space in tokens; empty for byte-level tokenizers.
        byte_fallback: a token such as ``<0xE4>`` is a byte.
        lead: spaces dropped at the start of a text: ``none``, ``one``, or ``token`` (all of the first token).
    """

    byte_level: bool = False
    space: str = ""
    byte_fallback: bool = False
    lead: Literal["none", "one", "token"] = "none"


class Adapter:
    """A tokenizer, seen through the calls that its kind offers. Nothing is set or changed on it."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self.skip_special_tokens = skip_special_tokens
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = (
            backend if backend is not None else tokenizer if hasattr(tokenizer, "id_to_token") else None
        )
        self._options = self._decode_options()
        added = self._added_tokens()
        self.added = frozenset(added)
        self.special = frozenset(id_ for id_, special in added.items() if special)
        pad, eos = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
        if pad is None:
            pad = (getattr(self._backend, "padding", None) or {}).get("pad_id")
        names = {id_: self._name(id_) for id_ in self.special}
        self.fillers = frozenset(
            id_
            for id_ in {pad, eos, *(i for i, name in names.items() if _MAY_PAD.search(name))}
            if type(id_) is int
        )
        """Tokens that sequences are padded with, as far as one can tell."""
        unsure = {id_ for id_ in self.fillers if "pad" not in names.get(id_, "").lower()}
        self.enders = frozenset(unsure if eos is None else {eos})
        """Those of them of which one may be the real end of a text."""

    def decode(self, ids: list[int]) -> str:
        """Let the tokenizer itself decode, clean-up off."""
        try:
            return str(self._tokenizer.decode(ids, **self._options))
        except BaseException as error:
            if type(error).__name__ == "PanicException":  # of Rust; not an Exception
                raise RuntimeError(str(error)) from error
            raise

    def token(self, id_: int) -> str | bytes | None:
        """Give the token as the vocabulary spells it; None where the vocabulary has none."""
        if not 0 <= id_ < 2**32:
            return None
        if self._backend is not None:
            return self._backend.id_to_token(id_)  # type: ignore[no-any-return]
        size = self._size()
        if size is not None and id_ >= size:
            return None
        convert = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        if convert is None:
            return ""  # in the vocabulary, as far as one can tell
        try:
            token = (convert([id_]) or [None])[0]
        except (LookupError, ValueError, OverflowError):
            return None
        return token if isinstance(token, (str, bytes)) else None

    def tokens(self) -> dict[int, str | bytes]:
        """Give the vocabulary; ids beyond its size may be missing, ``token`` knows them."""
        size = self._size() or 0
        ids = range(max(size, max(self.added, default=-1) + 1))
        token = self.token if self._backend is None else self._backend.id_to_token
        return {id_: text for id_, text in zip(ids, map(token, ids), strict=True) if text is not None}

    def scheme(self) -> Scheme | None:
        """Give the way in which this tokenizer joins tokens, as far as one can tell; None: no table can."""
        if self._backend is None:
            return self._python_scheme()
        decoder = getattr(self._backend, "decoder", None)
        return None if decoder is None else _scheme(json.loads(decoder.__getstate__()))

    def _python_scheme(self) -> Scheme | None:
        """A tokenizer in Python does not say how it joins tokens; those of a byte-level one show it."""
        size = self._size() or 0
        some = [self.token(id_) for id_ in range(0, size, max(1, size // 200))]
        byte_level = any(isinstance(token, bytes) or (token and "Ġ" in token) for token in some)
        return Scheme(byte_level=True) if byte_level else None

    def _name(self, id_: int) -> str:
        try:
            return str(self.token(id_) or "")
        except Exception:
            return ""  # decoding will meet the error, and tell

    def _size(self) -> int | None:
        if self._backend is not None:
            return int(self._backend.get_vocab_size(with_added_tokens=True))
        size = getattr(self._tokenizer, "vocab_size", None)
        size = len(self._tokenizer) if hasattr(self._tokenizer, "__len__") else size
        return size if type(size) is int else None

    def _added_tokens(self) -> dict[int, bool]:
        """Give the ids of the tokens outside the model's own vocabulary, and whether they are special."""
        if self._backend is not None and hasattr(self._backend, "get_added_tokens_decoder"):
            return {id_: token.special for id_, token in self._backend.get_added_tokens_decoder().items()}
        return dict.fromkeys(getattr(self._tokenizer, "all_special_ids", None) or (), True)

    def _decode_options(self) -> dict[str, bool]:
        wanted = {
            "skip_special_tokens": self.skip_special_tokens,
            # Both change the text: one drops spaces before punctuation, the other puts some around special
            # tokens. Their defaults differ between versions and models.
            "clean_up_tokenization_spaces": False,
            "spaces_between_special_tokens": False,
        }
        try:
            parameters = inspect.signature(self._tokenizer.decode).parameters
        except (TypeError, ValueError):
            return {"skip_special_tokens": self.skip_special_tokens}
        names = set(parameters)
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            inner = getattr(self._tokenizer, "_decode", None)  # what transformers hands the rest on to
            names |= set(inspect.signature(inner).parameters if inner else list(wanted)[:2])
        return {name: value for name, value in wanted.items() if name in names}


def _scheme(state: dict[str, Any]) -> Scheme | None:
    """Read the ``decoder`` of a ``tokenizer.json``; None when no table can replace it."""
    if state["type"] == "ByteLevel":
        return Scheme(byte_level=True)
    if state["type"] == "Metaspace":
        never = state.get("prepend_scheme", "always") == "never"
        return Scheme(space=state["replacement"], lead="none" if never else "token")
    steps = state.get("decoders", ())
    if [step["type"] for step in steps[:3]] != ["Replace", "ByteFallback", "Fuse"]:
        return None
    space = steps[0]["pattern"].get("String", "")
    if len(space) != 1 or steps[0]["content"] != " ":
        return None
    rest = steps[3:]
    if rest not in ([], [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]):
        return None
    return Scheme(space=space, byte_fallback=True, lead="one" if rest else "none")
