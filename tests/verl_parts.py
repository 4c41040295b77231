"""What the agents of the verl tests use: a tool of verl's kind with a life of its own, a reward function."""

from __future__ import annotations

from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class Recall(BaseTool):
    """A tool with a life of its own, which overrides ``execute`` as verl's users do."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        if parameters["word"] == "nothing":
            raise KeyError("nothing")
        return ToolResponse(text=f"{parameters['word']} it was"), 0.25, {"length": len(parameters["word"])}


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> dict[str, Any]:
    """Reward what ends with the right answer."""
    right = float(solution_str.rstrip().endswith(ground_truth))
    return {
        "score": right - 0.5,
        "acc": right,
        "said": len(solution_str),
        "verdict": "right" if right else "wrong",
    }
