"""Where a text may be cut without breaking what a reader sees as one character."""

from __future__ import annotations

import unicodedata

_ZERO_WIDTH_JOINER = "\u200d"
_VIRAMA = 9  # the canonical combining class of signs that join two Indic consonants


def may_cut(text: str, at: int) -> bool:
    """Say whether the text may be cut before position ``at`` (0 < at < len(text)).

    The rules are those of Unicode Standard Annex 29 for grapheme clusters, as far as ``unicodedata`` carries
    them: combining marks, joined emoji, skin tones, flags, Hangul syllables, line ends, and surrogate pairs.
    """
    before, after = text[at - 1], text[at]
    if before == _ZERO_WIDTH_JOINER or _extends(after) or before + after == "\r\n":
        return False
    if "\ud800" <= before <= "\udbff" and "\udc00" <= after <= "\udfff":
        return False
    if unicodedata.combining(before) == _VIRAMA and unicodedata.category(after) == "Lo":
        return False
    if _is_leading_jamo(before) and (_is_leading_jamo(after) or "\uac00" <= after <= "\ud7a3"):
        return False
    if _is_flag_half(before) and _is_flag_half(after):
        start = at - 1
        while start and _is_flag_half(text[start - 1]):
            start -= 1
        return (at - start) % 2 == 0
    return True


def _extends(character: str) -> bool:
    """Say whether the character belongs to the one before it."""
    if character < "\u0300":
        return False
    return (
        unicodedata.category(character) in ("Mn", "Mc", "Me")
        or character in "\u200c\u200d"
        or "\U0001f3fb" <= character <= "\U0001f3ff"  # skin tones
        or "\U000e0020" <= character <= "\U000e007f"  # tags of regional flags
        or "\u1160" <= character <= "\u11ff"  # vowels and final consonants of Hangul
        or "\ud7b0" <= character <= "\ud7fb"
    )


def _is_leading_jamo(character: str) -> bool:
    return "\u1100" <= character <= "\u115f" or "\ua960" <= character <= "\ua97c"


def _is_flag_half(character: str) -> bool:
    return "\U0001f1e6" <= character <= "\U0001f1ff"
