"""What every model of the configuration is made of. Core's and plugins' are built alike."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


class Strict(BaseModel):
    """Base of every configuration model, plugins' included."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False
    )


class Told(Strict):
    """A configuration that can be shown: texts from environment variables stay references in it."""

    _references: dict[tuple[str | int, ...], str] = PrivateAttr(default_factory=dict)

    def told(self) -> dict[str, Any]:
        """Plain data for files, observers and people; loading it gives an equal configuration."""
        data = self.model_dump(mode="json")
        for path, text in self._references.items():
            holder: Any = data
            for key in path[:-1]:
                holder = _inside(holder, key)
            if _inside(holder, path[-1]) is not None:
                holder[path[-1]] = text
        return data


def _inside(holder: Any, key: str | int) -> Any:
    """What is at a key; None where there is no such thing (any more)."""
    if isinstance(holder, dict):
        return holder.get(key)
    fits = isinstance(holder, list) and isinstance(key, int) and key < len(holder)
    return holder[key] if fits else None


class PluginRef(Strict):
    """A plugin by name. ``label`` is what metrics, columns and messages carry."""

    name: str = Field(description="Name of the plugin's entry point.")
    label: str | None = Field(default=None, description="Unique within its kind; defaults to the name.")
    options: dict[str, Any] = Field(default_factory=dict, description="The plugin's own options.")

    @property
    def tag(self) -> str:
        """The label, or else the name."""
        return self.label or self.name


class Execution(Strict):
    """How a reward is executed. Training, validation, evaluation and ``score`` read it alike."""

    executor: Literal["inline", "thread", "process"] = Field(
        default="inline",
        description="inline: one sample after another in this process; thread: several at a time, an "
        "overrunning one is left behind; process: several at a time, an overrunning one is killed.",
    )
    workers: Positive | None = Field(
        default=None,
        description="Samples at a time. Threads and processes: the CPUs, at most 8; async functions: 32.",
    )
    timeout: PositiveFloat | None = Field(
        default=None,
        description="Seconds that a sample may take; then it is unscorable. Threads and processes: 30.",
    )
    batch_timeout: PositiveFloat | None = Field(
        default=None, description="Seconds for all samples of a step; what is not done by then is unscorable."
    )
    on_error: Literal["raise", "mask", "value"] = Field(
        default="raise",
        description="An error on a sample ends the run, leaves the sample out, or gives it `value`, as "
        "then does a sample's timeout.",
    )
    value: float | None = Field(default=None, description="Score of a failed sample; with on_error: value.")
    memory_mb: Positive | None = Field(
        default=None, description="Address space of one worker process, in MiB; with executor: process."
    )
    cache: NonNegative = Field(
        default=0, description="Scores kept by content, the least recently used given up; 0 is off."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.value is not None) != (self.on_error == "value"):
            raise ValueError("give value and on_error: value together")
        if self.memory_mb is not None and self.executor != "process":
            raise ValueError("memory_mb limits worker processes: set executor: process")
        return self


class RewardRef(Execution, PluginRef):
    """A reward, and how it is executed."""
