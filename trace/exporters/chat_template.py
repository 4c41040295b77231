"""Text that a chat template made -> the messages it was made of, for the eyes of a person.

Three templates are known: ChatML (Qwen, SmolLM, many others), Llama 3's and Gemma's. Text of any other one
stays whole. What is recorded is never touched by this.
"""

from __future__ import annotations

import re

_BEGIN = re.compile(r"\s*(?:<\|begin_of_text\|>|<bos>|<s>)?\s*")
_MESSAGES = (
    re.compile(r"<\|im_start\|>(\w+)\n(.*?)(<\|im_end\|>|\Z)\s*", re.DOTALL),
    re.compile(
        r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n(.*?)(<\|eot_id\|>|<\|eom_id\|>|\Z)\s*", re.DOTALL
    ),
    re.compile(r"<start_of_turn>(\w+)\n(.*?)(<end_of_turn>|\Z)\s*", re.DOTALL),
)
_END = re.compile(r"(?:<\|im_end\|>|<\|eot_id\|>|<\|eom_id\|>|<end_of_turn>)\s*\Z")


def split(text: str) -> list[tuple[str, str]] | None:
    """Give the role and text of each message; None when the text is not wholly made of messages.

    The empty message of the assistant at the end, which asks for a generation, is left out.
    """
    start = _BEGIN.match(text)
    place = start.end() if start else 0
    for pattern in _MESSAGES:
        found: list[tuple[str, str]] = []
        at = place
        while message := pattern.match(text, at):
            role, content, end = message.groups()
            if end or content.strip():
                found.append((role, content))
            at = message.end()
            if not end:
                break
        if at == len(text) and at > place:
            return found
    return None


def without_end(text: str) -> str:
    """Take away the token that ends a generation."""
    return _END.sub("", text)
