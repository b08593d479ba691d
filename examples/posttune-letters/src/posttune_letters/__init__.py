"""The share of wanted letters as a reward."""

from collections.abc import Sequence

from posttune import hookimpl
from posttune.types import Sample
from pydantic import BaseModel, Field


class Letters:
    """The share of an answer's letters that are among those wanted; None without a letter."""

    class Config(BaseModel, extra="forbid"):
        """Options of the reward."""

        wanted: str = Field(default="aeiou", min_length=1, description="The letters that count.")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def reward_score(self, samples: Sequence[Sample]) -> list[float | None]:
        """One share for each sample, in order."""
        return [self._share(sample.response) for sample in samples]

    def _share(self, text: str) -> float | None:
        letters = [letter for letter in text.lower() if letter.isalpha()]
        if not letters:
            return None
        return sum(letter in self.config.wanted for letter in letters) / len(letters)
