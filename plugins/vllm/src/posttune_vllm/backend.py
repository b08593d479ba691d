"""The `vllm` engine behind its hooks."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from posttune import hookimpl
from posttune.errors import RunError, UserError
from posttune.types import BackendInfo, Completion, Request, RolloutContext, Sampling

from posttune_vllm.answers import completions
from posttune_vllm.installed import WHO
from posttune_vllm.options import VllmOptions
from posttune_vllm.sampling import check

if TYPE_CHECKING:
    import torch

    from posttune_vllm.link import Link
    from posttune_vllm.prepare import Prepared

log = logging.getLogger(__name__)


class VllmBackend:
    """Generates with vLLM: in a process of its own, in the trainer's, or behind a server.

    Log-probabilities are of the distribution that was sampled from, after temperature, top-k and top-p
    (vLLM's ``processed_logprobs``); of greedy answers, at temperature 1. Sample i of a request is drawn
    by vLLM's generator from (seed, i) alone.
    """

    Config = VllmOptions

    def __init__(self, config: VllmOptions) -> None:
        self.config = config
        self._link: Link | None = None
        self._ready: Prepared | None = None
        self._scratch: Path | None = None
        self._version = 0
        self._loads = 0
        self._whole = True  # no load was broken off

    @hookimpl
    def rollout_backend_start(self, context: RolloutContext) -> BackendInfo:
        """Check what can be known, then start the engine with the weights of ``context.model_path``."""
        from posttune_vllm import prepare

        self._scratch = Path(tempfile.mkdtemp(prefix="posttune-vllm-", dir=prepare.scratch_root(self.config)))
        try:
            self._ready = prepare.prepare(self.config, context, self._scratch)
            self._link = self._ready.link
            return self._ready.started(self._link.start())
        except BaseException:
            self.rollout_backend_stop()
            raise

    @hookimpl
    def rollout_backend_generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Answer every request ``sampling.n`` times, request-major."""
        ready, link = self._started()
        check(requests, sampling, ready.max_length, ready.has_tokenizer)
        if not self._whole:
            what = "a hand-over of weights was broken off: the engine holds a mixture"
            raise RunError(what, who=WHO, fix="load all weights again")
        logprobs = self.config.logprobs == "always" or (self.config.logprobs == "auto" and sampling.logprobs)
        # vLLM draws one greedy answer a prompt; the others would be the same.
        copies = sampling.n if sampling.temperature == 0 else 1
        asked = replace(sampling, n=sampling.n // copies)
        answers = link.generate(requests, asked, logprobs=logprobs)
        answers = [answer for answer in answers for _ in range(copies)]
        return completions(requests, sampling.n, answers, self._version)

    @hookimpl
    def rollout_backend_load_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, adapter: str | None
    ) -> bool:
        """Take weights in place and drop every cache.

        With ``adapter``, the PEFT folder whose configuration they follow, they are an adapter's alone.
        """
        ready, link = self._started()
        if adapter is not None:
            folder = ready.write_adapter(tensors, Path(adapter))
            link.load_adapter(folder)
            shutil.rmtree(folder)
            self._version = version
            return True
        from posttune_vllm.weights import Checked, Remembered

        self._whole = False
        checked = Checked(tensors, ready.facts, ready.needed)
        if self.config.verify == "always" or (self.config.verify == "first" and not self._loads):
            remembered = Remembered(checked, ready.dtype)
            link.load(remembered)
            self._compared(remembered.compare(link.checksums()))
        else:
            link.load(checked)
        self._whole, self._version = True, version
        self._loads += 1
        return True

    @hookimpl
    def rollout_backend_checksums(self) -> dict[str, str]:
        """SHA-256 of each tensor by Hugging Face name, read back from the engine."""
        ready, link = self._started()
        found = link.checksums()
        return {name: found[name] for name in found if not ready.facts.shapes or name in ready.facts.shapes}

    @hookimpl
    def rollout_backend_sleep(self) -> bool:
        """Free the weights and the cache; the weights must be loaded again."""
        _, link = self._started()
        link.sleep()
        self._whole = False
        return True

    @hookimpl
    def rollout_backend_wake(self, part: Literal["weights", "cache"]) -> bool:
        """Take memory for the weights, and after they were loaded for the cache."""
        _, link = self._started()
        link.wake(part)
        return True

    @hookimpl
    def rollout_backend_stop(self) -> bool:
        """End the engine and remove what was written for it."""
        link, self._link = self._link, None
        scratch, self._scratch = self._scratch, None
        try:
            if link is not None:
                link.stop()
        finally:
            if scratch is not None:
                shutil.rmtree(scratch, ignore_errors=True)
        return True

    def _started(self) -> tuple[Prepared, Link]:
        if self._link is None or self._ready is None:
            raise UserError("the engine is not running", who=WHO, fix="start it first")
        return self._ready, self._link

    def _compared(self, count: int) -> None:
        if not self._loads:
            log.info("%s: %d tensors read back from the engine equal those handed over", WHO, count)
