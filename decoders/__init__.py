"""Token ids -> text, honestly cut to a length."""

from .cut import Cut, TextCut, cut_text, decode_cut
from .find import find_tokenizer
from .hf import DecoderError, HFDecoder, Stream

__all__ = [
    "Cut",
    "DecoderError",
    "HFDecoder",
    "Stream",
    "TextCut",
    "cut_text",
    "decode_cut",
    "find_tokenizer",
]
