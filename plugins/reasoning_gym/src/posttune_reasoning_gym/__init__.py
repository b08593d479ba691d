"""reasoning-gym's scorers as a reward (Stojanovski et al. 2025, arXiv:2505.24760)."""

from __future__ import annotations

from typing import Any, Literal

from posttune import BaseRewardFunction, hookimpl
from posttune.errors import DataError, UserError
from posttune.types import Needs
from pydantic import BaseModel, Field, field_validator

RUNS_TEXT = (
    *("binary_matrix", "n_queens", "spiral_matrix", "string_insertion", "countdown", "puzzle24"),
    *("polynomial_multiplication", "simple_integration", "intermediate_integration"),
)
"""Tasks whose scorers evaluate the answer's text as Python (eval, or SymPy's parser)."""

ACCEPTS_ANYTHING = ("game_of_life_halting",)
"""Tasks whose scorers give 1.0 to wrong answers."""

DENIED = (*RUNS_TEXT, *ACCEPTS_ANYTHING)


class ReasoningGymReward(BaseRewardFunction):
    """The score, 0 to 1, that a task's own scorer gives to the answer within a response.

    The data comes from ``posttune reasoning-gym``: the columns ``task`` and ``task_args``.
    """

    class Config(BaseModel, extra="forbid"):
        """Options of the reward."""

        answer: Literal["tags", "whole"] = Field(
            "tags", description="tags: the last <answer>...</answer>, 0 without one; whole: the response."
        )
        allow: list[str] = Field(
            default_factory=list,
            description="Denied tasks to score all the same, by name; needs executor: process.",
        )
        memory_mb: int = Field(
            4096, gt=0, description="Address space of the process that scores an allowed task."
        )

        @field_validator("allow")
        @classmethod
        def _are_denied(cls, value: list[str]) -> list[str]:
            for name in value:
                if name not in DENIED:
                    raise ValueError(f"{name!r} is not denied; denied are {', '.join(DENIED)}")
            return value

    @hookimpl
    def reward_needs(self) -> Needs:
        """The columns; a process of its own where a denied task is allowed."""
        columns = ("task", "task_args")
        return Needs(columns=columns, each=True, reads=columns, isolated=bool(self.config.allow))

    def compute_reward(
        self,
        prompt: str,  # noqa: ARG002
        response: str,
        reference: Any = None,  # noqa: ARG002
        task: str = "",
        task_args: str = "",
        **_columns: Any,
    ) -> float:
        """The task's score. Raises UserError for a denied task, DataError for what is no task."""
        self._check(task)
        from posttune_reasoning_gym import _tasks

        answer = _tasks.tagged(response) if self.config.answer == "tags" else response.strip()
        return 0.0 if answer is None else _tasks.score(task, task_args, answer)

    def _check(self, task: str) -> None:
        if not task:
            fix = "make the data with `posttune reasoning-gym`"
            raise DataError("the sample names no task", who="reward 'reasoning_gym'", fix=fix)
        if task not in DENIED:
            return
        if task not in self.config.allow:
            why = "runs the model's text" if task in RUNS_TEXT else "gives 1.0 to wrong answers"
            fix = f"leave the task out, or set options.allow: [{task}] and executor: process"
            what = f"the task {task!r} is denied: its scorer {why}"
            raise UserError(what, who="reward 'reasoning_gym'", fix=fix)
        from posttune_reasoning_gym._isolation import isolate

        isolate(self.config.memory_mb)
