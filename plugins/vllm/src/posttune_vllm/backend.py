"""The `vllm` engine behind its hooks."""

from __future__ import annotations

from pathlib import Path

from posttune.engines.backend import EngineBackend, Prepared, scratch_root
from posttune.types import RolloutContext

from posttune_vllm.installed import WHO
from posttune_vllm.options import VllmOptions


class VllmBackend(EngineBackend):
    """Generates with vLLM: in a process of its own, in the trainer's, or behind a server.

    Log-probabilities are of the distribution that was sampled from, after temperature, top-k and top-p
    (vLLM's ``processed_logprobs``); of greedy answers, at temperature 1. Sample i of a request is drawn
    by vLLM's generator from (seed, i) alone.
    """

    Config = VllmOptions
    who = WHO

    def __init__(self, config: VllmOptions) -> None:
        super().__init__(config)

    def scratch(self) -> Path | None:
        """Memory, or what a server's machine shares with this one."""
        options: VllmOptions = self.config
        return scratch_root(options.shared_folder)

    def prepare(self, context: RolloutContext, scratch: Path) -> Prepared:
        """Checks, and the engine's arguments."""
        from posttune_vllm.prepare import prepare

        options: VllmOptions = self.config
        return prepare(options, context, scratch)
