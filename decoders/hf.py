"""Text of token ids by any Hugging Face tokenizer."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from . import bytetable
from .adapter import Adapter
from .bytetable import LONG_RUN, ByteTable
from .ids import IGNORE_INDEX, Item, as_id, as_list, id_marker, marker
from .wholetext import WholeText

logger = logging.getLogger("trackway.decoders")


class DecoderError(Exception):
    """There is no tokenizer to decode with."""


class HFDecoder:
    """Gives the text of token ids as it was sampled: nothing hidden, nothing cleaned up, no exception.

    What has no text is marked: ``⟨153058⟩`` for an id beyond the vocabulary, ``⟨-100 ×512⟩`` for a run of
    one, ``⟨<pad> ×1,024⟩`` for four or more padding tokens in a row (where padding may also be the end of
    the text, the first one after other text stays). Integral floats count as ids; booleans and strings do
    not.

    For byte-level tokenizers, and for those of SentencePiece's kind, the text comes from a table of bytes
    that is made once, compared with the tokenizer on a fixed sample, and not used if they differ. It is
    about ten times as fast, and starts no threads of the tokenizers library that a later fork would trip
    over. ``decode`` and ``pieces`` may be called from several threads.

    Args:
        tokenizer: fast or slow tokenizer, ``tokenizers.Tokenizer``, processor with ``.tokenizer``, the path
            of a ``tokenizer.json`` or of a model's folder, or a name in the local Hugging Face cache. Paths
            and names are loaded at first use, once, and never from the network.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        DecoderError: the object has no ``decode``.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = False) -> None:
        self.skip_special_tokens = skip_special_tokens
        self._source = os.fspath(tokenizer) if isinstance(tokenizer, (str, os.PathLike)) else None
        self._codec = None if self._source is not None else self._make_codec(tokenizer)
        self._error: DecoderError | None = None
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self._own_stream: Stream | None = None

    def load(self) -> None:
        """Load the tokenizer now, if it was given by path or name.

        Raises:
            DecoderError: it is not there or cannot be read. The outcome is kept; nothing is tried again.
        """
        self.codec()

    def decode(self, ids: Any, *, continued: bool = False) -> str:
        """Give the text of ids. Never raises: failure gives ``⟨decode failed: …⟩``, and one warning a kind.

        Args:
            ids: list, tuple, range, numpy array or torch tensor of shape (n,) or (1, n), or any iterable.
            continued: text came before; the space that SentencePiece drops at the start of a text is kept.
        """
        try:
            codec = self.codec()
            values = as_list(ids)
            text = codec.quick(values, continued)
            if text is None:
                text = codec.text(collapse(codec, plain_items(codec, values), True), continued)
            return text
        except Exception as error:
            return self.failed(error)

    def pieces(self, ids: Any) -> list[str]:
        """Give one string for each id; joined they are the decoded text.

        A character made of several tokens is with the last of them, the marker of a run with the first.
        """
        values: Sequence[Any] = ()
        try:
            values = as_list(ids)
            codec = self.codec()
            return codec.pieces(collapse(codec, plain_items(codec, values), True), False)
        except Exception as error:
            return [self.failed(error), *[""] * (len(values) - 1)]

    def unknown(self, ids: Any) -> int:
        """Count the ids that have no text, apart from the ignore index -100."""
        try:
            items = plain_items(self.codec(), as_list(ids))
        except Exception as error:
            self.failed(error)
            return 0
        return sum(isinstance(item, str) and item != id_marker(IGNORE_INDEX) for item in items)

    def stream(self) -> Stream:
        """Begin a sequence whose ids come bit by bit."""
        return Stream(self)

    def feed(self, ids: Any) -> str:
        """Feed the decoder's own stream; use ``stream`` for several sequences at once."""
        if self._own_stream is None:
            self._own_stream = self.stream()
        return self._own_stream.feed(ids)

    def flush(self) -> str:
        """End the decoder's own stream and give what it held back."""
        stream, self._own_stream = self._own_stream, None
        return stream.flush() if stream else ""

    def codec(self) -> ByteTable | WholeText:
        """Give what does the decoding; for use inside this package."""
        if self._codec is None:
            with self._lock:
                if self._codec is None and self._error is None and self._source is not None:
                    try:
                        self._codec = self._make_codec(_load(self._source))
                    except DecoderError as error:
                        self._error = error
            if self._error is not None:
                raise DecoderError(str(self._error))
        assert self._codec is not None
        return self._codec

    def failed(self, error: Exception) -> str:
        """Warn, once for each kind of error, and give the text that is shown; for use inside this package."""
        kind = type(error).__name__
        text = f"⟨decode failed: {kind}: {_short(error, 120)}⟩"
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("token ids could not be decoded: %s: %s (said once)", kind, _short(error, 500))
        return text

    def _make_codec(self, tokenizer: Any) -> ByteTable | WholeText:
        if not hasattr(tokenizer, "convert_ids_to_tokens") and not hasattr(tokenizer, "id_to_token"):
            inner = getattr(tokenizer, "tokenizer", None)  # of a processor
            tokenizer = inner if hasattr(inner, "decode") else tokenizer
        if not callable(getattr(tokenizer, "decode", None)):
            raise DecoderError(
                f"cannot decode with {type(tokenizer).__name__}: it has no decode(). Give a Hugging Face "
                "tokenizer, a processor that has one, or the path or name of one"
            )
        adapter = Adapter(tokenizer, self.skip_special_tokens)
        try:
            table = bytetable.build(adapter)
        except Exception:
            logger.debug("no byte table for %s", type(tokenizer).__name__, exc_info=True)
            table = None
        return table or WholeText(adapter)


class Stream:
    """Decodes one sequence bit by bit; what ``feed`` and the last ``flush`` give makes the decoded text.

    Held back are characters that are not complete and runs that may go on. With a tokenizer whose text no
    table gives, all is held back until ``flush``, since any token might still change the text before it.
    """

    def __init__(self, decoder: HFDecoder) -> None:
        self._decoder = decoder
        self._restart()

    def _restart(self) -> None:
        self._held: list[Any] = []
        self._started = False
        self._continued = False

    def feed(self, ids: Any) -> str:
        """Give the text that the ids make certain."""
        self._held += as_list(ids)
        try:
            codec = self._decoder.codec()
            items = plain_items(codec, self._held)
            collapsed = collapse(codec, items, not self._started)
            ready = min(codec.settled(collapsed), _last_run(codec, items))
            text = codec.text(collapsed[:ready], self._continued)
            self._continued = self._continued or codec.begins(collapsed[:ready])
        except Exception:
            return ""  # flush meets the error again and tells
        self._started = self._started or ready > 0
        del self._held[:ready]
        return text

    def flush(self) -> str:
        """End the sequence and give the rest of its text; the next ``feed`` begins a new one."""
        try:
            codec = self._decoder.codec()
            items = collapse(codec, plain_items(codec, self._held), not self._started)
            return codec.text(items, self._continued)
        except Exception as error:
            return self._decoder.failed(error) if self._held else ""
        finally:
            self._restart()


def plain_items(codec: ByteTable | WholeText, values: Any) -> list[Item]:
    """Keep the ids that the vocabulary knows, and put markers for all other values."""
    items: list[Item] = []
    for value in values:
        item = as_id(value)
        items.append(item if isinstance(item, str) or codec.knows(item) else id_marker(item))
    return items


def collapse(codec: ByteTable | WholeText, items: list[Item], at_start: bool) -> list[Item]:
    """Replace each run of a marker, and each long run of padding, by one marker followed by empty strings.

    Where padding may also be the end of the text, the first of a run stays; except at the start of a sequence
    that goes on after the run, since there it is padding on the left.
    """
    result: list[Item] = []
    for item, group in groupby(items):
        count = sum(1 for _ in group)
        if isinstance(item, str):
            label, kept = item[1:-1], 0
        elif count >= LONG_RUN and item in codec.adapter.fillers:
            label = codec.text([item], True)
            left = at_start and not result and count < len(items)
            kept = 1 if item in codec.adapter.enders and not left else 0
        else:
            label, kept = "", count
        if label:
            result += [item] * kept + [marker(label, count - kept)] + [""] * (count - kept - 1)
        else:
            result += [item] * count
    return result


def _last_run(codec: ByteTable | WholeText, items: list[Item]) -> int:
    """Give the position where a run begins that may go on and be collapsed; the length when there is none."""
    end = len(items)
    if items and (isinstance(items[-1], str) or items[-1] in codec.adapter.fillers):
        while end and items[end - 1] == items[-1]:
            end -= 1
    return end


def _load(source: str) -> Any:
    try:
        if Path(source).is_file():
            from tokenizers import Tokenizer

            return Tokenizer.from_file(source)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except ImportError as error:
        raise DecoderError(
            f"the tokenizer {source!r} needs a package that is not there: pip install 'trackway[hf]' "
            f"({_short(error, 200)})"
        ) from error
    except Exception as error:
        raise DecoderError(
            f"no tokenizer {source!r}: it is neither a tokenizer.json, nor a folder with one, nor a name in "
            "the local Hugging Face cache, and nothing is downloaded here. Download it first, or give the "
            f"tokenizer itself ({_short(error, 200)})"
        ) from error


def _short(error: Exception, length: int) -> str:
    """Give an error's message on one line."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "(its message cannot be read)"
    return text if len(text) <= length else text[: length - 1] + "…"
