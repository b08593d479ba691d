"""What the checks of the rollout suite share: how the engine is made, and how answers are measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import psutil
import pytest
import torch
from torch import Tensor

from posttune.config.models import PluginRef
from posttune.facade import RolloutEngine, build_rollout
from posttune.testing._rollout_bench import Bench, tokens
from posttune.types import Completion, Request, Sampling

GREEDY = Sampling(max_new_tokens=12, temperature=0)
LARGEST_GAP = 1e-3  # nats a token, engine against trainer, in float32
MEAN_GAP = 0.1  # nats a token, in a rounded type: 0.03 to 0.06 is usual, wrong weights give 1 to 6


class RolloutChecks:
    """The attributes that a subclass sets, and the tools of the checks."""

    backend: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    dtype: ClassVar[str] = "float32"
    device: ClassVar[str] = "cpu"
    memory_share: ClassVar[float | None] = None  # of the accelerator, for the engine
    max_sequences: ClassVar[int | None] = 8  # fewer than the checks ask for: some must wait
    live: ClassVar[bool] = True  # the engine is told of the trainer's module, as a trainer does
    batch_independent: ClassVar[bool] = True  # an answer is the same whatever shares its batch, kept or not
    truncated_logprobs: ClassVar[bool] = True  # log-probabilities are of the distribution after top-k, top-p
    own_process: ClassVar[bool] = False  # the engine runs in a process of its own
    sleeps: ClassVar[bool] = False  # BackendInfo.sleep
    sleep_frees_gb: ClassVar[float] = 0.0  # of the accelerator, that are free while it sleeps
    deadline_s: ClassVar[float] = 20.0  # for an error after its process died, and for its end after a stop
    growth_mb: ClassVar[float] = 12.0  # that 50 loads may leave behind; the model has half a megabyte

    _bench: ClassVar[Bench | None] = None

    def make(self) -> RolloutEngine:
        """The engine, composed and not started."""
        return build_rollout(PluginRef(name=self.backend, options=dict(self.options)))

    def victim(self, bench: Bench) -> psutil.Process:
        """The process to kill: by default the last one of the engine's that has no children."""
        return next(each for each in reversed(bench.processes) if not each.children())

    @classmethod
    def setup_class(cls) -> None:
        """Nothing is started yet."""
        cls._bench = None

    @classmethod
    def teardown_class(cls) -> None:
        """Stop the engine that the checks shared."""
        if cls._bench is not None:
            cls._bench.close()
            cls._bench = None

    @pytest.fixture
    def bench(self, tmp_path_factory: pytest.TempPathFactory) -> Bench:
        """The shared engine and its trainer, with the weights of the beginning."""
        cls = type(self)
        if cls._bench is None:
            cls._bench = Bench(self, tmp_path_factory.mktemp("rollout") / "model")
        cls._bench.reset()
        return cls._bench

    @contextlib.contextmanager
    def alone(self, bench: Bench, folder: str = "model", *, tie: bool = False) -> Iterator[Bench]:
        """An engine for one check; the shared one stops first."""
        bench.close()
        mine = Bench(self, bench.folder.parent / folder, tie=tie)
        try:
            yield mine
        finally:
            mine.forget()

    @property
    def exact(self) -> bool:
        """Whether rounding is small enough to compare tokens."""
        return self.dtype == "float32"

    @property
    def tolerance(self) -> float:
        """Nats a token: of the largest gap where ``exact``, of the mean in a rounded type."""
        return LARGEST_GAP if self.exact else MEAN_GAP

    def size(self, gaps: Tensor) -> float:
        """One number for many gaps, to be compared with ``tolerance``."""
        return float(gaps.abs().max() if self.exact else gaps.abs().mean())

    def assert_same(self, found: Sequence[Completion], wanted: Sequence[Completion]) -> None:
        """The same answers. Where rounding depends on the batch a few may differ: nine of ten begin alike."""
        if self.batch_independent:
            assert tokens(found) == tokens(wanted)
            return
        alike = [a[:1] == b[:1] for a, b in zip(tokens(found), tokens(wanted), strict=True)]
        assert sum(alike) >= int(0.9 * len(alike)), alike

    def assert_greedy(self, bench: Bench, answers: Sequence[Completion], model: Any = None) -> None:
        """Every token is the likeliest of the trainer's model."""
        assert answers
        gaps = []
        for answer in answers:
            logits = bench.logits(answer, model)
            chosen = logits.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
            gaps.append(logits.max(-1).values - chosen)
        gap = self.size(torch.cat(gaps))
        assert gap < self.tolerance, f"chosen tokens lie {gap} nats below the likeliest"

    def assert_agrees(self, bench: Bench, answers: Sequence[Completion], temperature: float) -> None:
        """The log-probabilities are those of the trainer at this temperature; of greedy answers, at 1."""
        wanted = torch.cat(bench.logprobs(answers, temperature or 1.0))
        found = torch.tensor([value for answer in answers for value in answer.logprobs or ()])
        assert found.shape == wanted.shape
        gap = self.size(found - wanted)
        assert gap < self.tolerance, f"log-probabilities differ from the trainer's by {gap}"

    def scripted(self, bench: Bench, prompt: str, parts: Sequence[str | int]) -> tuple[Request, list[int]]:
        """Load a model that answers ``prompt`` with ``parts``: text, or ids of tokens.

        Returns the request, and the chain of tokens from the prompt's last one to the answer's.
        """
        ids = bench.tokenizer.encode(prompt)
        chain = [ids[-1]]
        for part in parts:
            chain += [part] if isinstance(part, int) else bench.tokenizer.encode(part)
        bench.set(bench.script(chain))
        return Request("scripted", tuple(ids), 5), chain
