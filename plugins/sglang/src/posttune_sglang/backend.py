"""The `sglang` engine behind its hooks."""

from __future__ import annotations

from pathlib import Path

from posttune.engines.backend import EngineBackend, Prepared
from posttune.types import RolloutContext

from posttune_sglang.installed import WHO
from posttune_sglang.options import SglangOptions


class SglangBackend(EngineBackend):
    """Generates with SGLang, in a process of its own.

    Log-probabilities are of the distribution that was sampled from, after temperature, top-k and top-p; of
    greedy answers, at temperature 1. Sample i of a request is drawn from (seed, i) and its place alone, by
    posttune's own sampler inside SGLang: SGLang draws by seed only in its deterministic mode.
    """

    Config = SglangOptions
    who = WHO

    def __init__(self, config: SglangOptions) -> None:
        super().__init__(config)

    def prepare(self, context: RolloutContext, scratch: Path) -> Prepared:
        """Checks, and the engine's arguments."""
        from posttune_sglang.prepare import prepare

        options: SglangOptions = self.config
        return prepare(options, context, scratch)
