"""An engine in the trainer's own process."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttune.engines.answers import Answer
from posttune.engines.link import Part, Plan
from posttune.engines.problems import Told
from posttune.engines.requests import seed_of
from posttune.errors import PosttuneError, RunError, UserError
from posttune.types import Request, Sampling

from posttune_vllm import environment
from posttune_vllm.installed import WHO

if TYPE_CHECKING:
    import torch

    from posttune_vllm._engine import Engine


class Inline:
    """Fastest to start and to take weights; an engine that crashes takes the trainer along."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._engine: Engine | None = None

    def start(self) -> dict[str, Any]:
        """The engine, with this process's generators, threads and process group left alone."""
        from posttune_vllm import _side_effects

        plan = self._plan
        self._check()
        variables = environment.settings(cuda=plan.cuda, eager=False)
        with self._step("start"), _side_effects.start_inside(variables), _side_effects.eager(_eager(plan)):
            from posttune_vllm._engine import Engine

            self._engine = Engine(plan.arguments, plan.version)
        return self._engine.hello

    def generate(self, requests: Sequence[Request], sampling: Sampling, *, logprobs: bool) -> list[Answer]:
        """``n`` answers to each request, in order."""
        prompts = [list(request.prompt_ids) for request in requests]
        seeds = [seed_of(request) for request in requests]
        parameters = self._plan.parameters(sampling, logprobs)
        with self._step("generation"):
            return self._running().generate(prompts, seeds, parameters)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Straight from the trainer's tensors."""
        with self._step("the hand-over of weights"):
            self._running().load(tensors)

    def load_adapter(self, folder: Path) -> None:
        """From a PEFT folder."""
        with self._step("the hand-over of an adapter"):
            self._running().load_adapter(folder)

    def checksums(self) -> dict[str, str]:
        """Read back from the engine."""
        with self._step("reading its checksums"):
            return self._running().checksums()

    def sleep(self) -> None:
        """Free the GPU."""
        with self._step("going to sleep"):
            self._running().sleep()

    def wake(self, part: Part) -> None:
        """Take memory again."""
        with self._step(f"waking its {part}"):
            self._running().wake(part)

    def stop(self) -> None:
        """Let go of it, and of the process group that it made."""
        from posttune_vllm import _side_effects

        if self._engine is not None:
            engine, self._engine = self._engine, None
            with _side_effects.stop_inside():
                engine.stop()

    def _running(self) -> Engine:
        if self._engine is None:
            raise RunError("the engine has stopped", who=WHO, fix="start another")
        return self._engine

    def _check(self) -> None:
        fix = "set rollout.options.process: child"
        if int(self._plan.arguments["tensor_parallel_size"]) > 1:
            what = "an engine in the trainer's process spans one GPU"
            raise UserError(what, who=WHO, fix=fix)
        if self._plan.cuda and self._plan.device.partition(":")[2] not in ("", "0"):
            what = f"an engine in the trainer's process is on its first GPU, not on {self._plan.device}"
            raise UserError(what, who=WHO, fix=fix)

    @contextmanager
    def _step(self, step: str) -> Iterator[None]:
        """Errors of vLLM as ours, and the trainer's chance as it was."""
        from posttune_vllm import _side_effects

        plan = self._plan
        with _side_effects.untouched(), _side_effects.eager(_eager(plan)):
            try:
                yield
            except PosttuneError:
                raise
            except Exception as error:
                place = "".join(traceback.format_exception(error)[-4:])
                told = Told(type(error).__name__, str(error), place)
                raise plan.explainer.explain(told, step, plan.ledger()) from error


def _eager(plan: Plan) -> bool:
    """Whether nothing is compiled."""
    return bool(plan.arguments["enforce_eager"])
