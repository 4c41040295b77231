"""The world of the demo's agent: questions, the prompt that shows how to use the tool, the calculator."""

from __future__ import annotations

import ast
import operator
import random
import warnings
from dataclasses import dataclass

SYSTEM = (
    "You answer arithmetic questions with the help of a calculator. Write <tool>expression</tool> to use it; "
    "the result comes back. Never calculate yourself. When the result answers the question, write Answer: "
    "and the number."
)

# A question, then what the assistant and the tool say in turn.
EXAMPLES = (
    (
        "What is 7 squared?",
        "<tool>7^2</tool>",
        "error: unknown: 7 ^ 2",
        "<tool>7*7</tool>",
        "49",
        "Answer: 49",
    ),
    (
        "What is 100 minus 64, divided by 4?",
        "<tool>100-64</tool>",
        "36",
        "<tool>36/4</tool>",
        "9",
        "Answer: 9",
    ),
    ("A box holds 7 pens. How many pens are in 4 boxes?", "<tool>7*4</tool>", "28", "Answer: 28"),
    ("Multiply 2 by 3, then add 15.", "<tool>2*3</tool>", "6", "<tool>6+15</tool>", "21", "Answer: 21"),
    ("What is half of 50?", "<tool>50/2</tool>", "25", "Answer: 25"),
    ("What is 13 times 8?", "<tool>13*8</tool>", "104", "Answer: 104"),
)

TEMPLATES = (
    ("What is {a} times {b}?", "{a}*{b}"),
    ("What is {c} squared?", "{c}*{c}"),
    ("What is {d:,} minus {b}0?", "{d}-{b}0"),
    ("A crate holds {b} apples. How many apples are in {a} crates?", "{a}*{b}"),
    ("What is half of {b}?", "{b}/2"),
    ("What is {b}0 minus {a}, divided by 2?", "({b}0-{a})/2"),
    ("What is {a}% of {b}0?", "{b}0*{a}/100"),
    ("Add {a} and {b}, then multiply by {c}.", "({a}+{b})*{c}"),
)

OPEN = "<|im_start|>assistant\n"


@dataclass(frozen=True, slots=True)
class Task:
    question: str
    expression: str

    @property
    def answer(self) -> str:
        return calculate(self.expression)


def task(index: int) -> Task:
    """Return the question with this number; there is no last one, and it is the same every time."""
    question, expression = TEMPLATES[index % len(TEMPLATES)]
    draw = random.Random(6 + index)  # from 6 on, the first four are neither all easy nor all hard
    numbers = {
        "a": draw.randint(11, 19),
        "b": draw.randint(21, 49),
        "c": draw.randint(3, 9),
        "d": draw.randint(1000, 1999),
    }
    return Task(question.format(**numbers), expression.format(**numbers))


def message(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def prompt(question: str) -> str:
    """Return the whole conversation up to where the assistant speaks, in ChatML."""
    text = message("system", SYSTEM)
    for example, *replies in EXAMPLES:
        text += message("user", example)
        for number, reply in enumerate(replies):
            text += message("tool" if number % 2 else "assistant", reply)
    return text + message("user", question) + OPEN


_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> str:
    """Evaluate numbers with + - * / and parentheses.

    Raises:
        ValueError: it is no such expression, or divides by zero.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Python thinks of the style of "12and 3" is for nobody
            tree = ast.parse(expression.strip(), mode="eval")
        return f"{_value(tree.body):.10g}"
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"no expression: {expression}") from None
    except (ZeroDivisionError, OverflowError) as error:
        raise ValueError(str(error)) from None


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return float(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError(f"unknown: {ast.unparse(node)}")
