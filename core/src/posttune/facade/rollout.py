"""The rollout engine: what may be called when, and what a backend may answer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, get_args

from posttune.errors import RunError
from posttune.facade.values import shown
from posttune.pipeline import Member
from posttune.types import BackendInfo, Completion, FinishReason, Request, RolloutContext, Sampling

if TYPE_CHECKING:
    import torch
    from torch import nn

State = Literal["new", "ready", "asleep", "half awake", "stopped"]
_REASONS = get_args(FinishReason)
_GENERATE = "rollout_backend_generate"
_LOAD = "rollout_backend_load_weights"


class RolloutEngine:
    """A rollout backend and its state. A context manager that stops it.

    ``start``, then any of ``generate``, ``load_weights`` and the round ``sleep``,
    ``wake("weights")``, ``load_weights``, ``wake("cache")``, then ``stop``. A call out of turn
    raises RunError. Where the backend cannot sleep, ``sleep`` and ``wake`` do nothing.
    ``version`` is that of the weights in use; 0 until the first ``load_weights``.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._state: State = "new"
        self._fresh = True  # no weights were lost to sleep
        self._info: BackendInfo | None = None
        self._live: nn.Module | None = None  # the trainer's model, where the engine computes with it
        self.version = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def name(self) -> str:
        """The backend's name."""
        return self._member.id.name

    @property
    def info(self) -> BackendInfo:
        """What the backend can do; known once it has started."""
        if self._info is None:
            raise self._out_of_turn("ask for its abilities")
        return self._info

    def start(self, context: RolloutContext) -> BackendInfo:
        """Start the engine."""
        self._require("start it", "new")
        info = self._member.call("rollout_backend_start", context=context)
        if not isinstance(info, BackendInfo):
            raise self._member.wrong("rollout_backend_start", f"{shown(info)}, not BackendInfo")
        self._info = info
        self._live = context.live_model if info.shares_weights else None
        self._state = "ready"
        return info

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Answer every request ``sampling.n`` times: ``len(requests) * n`` completions, request-major."""
        self._require("generate", "ready")
        if not requests:
            self._take_part()
            return []
        answers = self._member.call(_GENERATE, requests=requests, sampling=sampling)
        if not isinstance(answers, list | tuple):
            raise self._member.wrong(_GENERATE, f"{shown(answers)}, not a list of completions")
        expected = len(requests) * sampling.n
        if len(answers) != expected:
            what = f"{len(answers)} completions for {len(requests)} requests x {sampling.n} samples"
            raise self._member.wrong(_GENERATE, what)
        for position, answer in enumerate(answers):
            request = requests[position // sampling.n]
            fault = self._fault(answer, request, position % sampling.n, sampling)
            if fault:
                raise self._member.wrong(_GENERATE, f"{fault} at position {position}, request {request.id}")
        return list(answers)

    def _take_part(self) -> None:
        """A model that is cut over processes is put together by all, also those with nothing to ask."""
        if self._live is not None:
            from posttune.distributed.tensors import whole

            with whole(self._live):
                pass

    def load_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, adapter: str | None = None
    ) -> None:
        """Take new weights, by Hugging Face name. ``version`` never falls."""
        self._require("load weights", "ready", "half awake")
        if version < self.version:
            raise RunError(f"weights of version {version} after {self.version}", who=str(self._member.id))
        if adapter is not None and not self.info.lora:
            raise RunError("this backend takes no adapters", who=str(self._member.id), fix="merge it first")
        watched = _Watched(tensors)
        self._confirm(_LOAD, tensors=watched, version=version, adapter=adapter)
        if not watched.exhausted and not self.info.shares_weights:
            raise self._member.wrong(_LOAD, f"after {watched.taken} tensors, with more to come")
        self.version = version
        self._fresh = True

    def checksums(self) -> dict[str, str]:
        """SHA-256 of each tensor's bytes by Hugging Face name; empty where the backend cannot tell."""
        self._require("read its checksums", "ready")
        if not self._member.implements("rollout_backend_checksums"):
            return {}
        sums = self._member.call("rollout_backend_checksums")
        if not isinstance(sums, Mapping) or not all(isinstance(each, str) for each in sums.values()):
            raise self._member.wrong("rollout_backend_checksums", f"{shown(sums)}, not a dict of strings")
        return dict(sums)

    def sleep(self) -> None:
        """Free the accelerator's memory."""
        self._require("put it to sleep", "ready")
        if self._can_sleep():
            self._confirm("rollout_backend_sleep")
            self._state, self._fresh = "asleep", False

    def wake(self, part: Literal["weights", "cache"]) -> None:
        """Take memory again: "weights", then ``load_weights``, then "cache"."""
        if not self._can_sleep():
            self._require("wake it", "ready")
            return
        self._require(f"wake its {part}", "asleep" if part == "weights" else "half awake")
        if part == "cache" and not self._fresh:
            raise self._out_of_turn("wake its cache before its weights are loaded")
        self._confirm("rollout_backend_wake", part=part)
        self._state = "half awake" if part == "weights" else "ready"

    def stop(self) -> None:
        """Stop the engine. May be called at any time, and again."""
        if self._state != "stopped":
            was, self._state = self._state, "stopped"
            if was != "new":
                self._confirm("rollout_backend_stop")

    def _can_sleep(self) -> bool:
        can = self._member.implements
        return self.info.sleep and can("rollout_backend_sleep") and can("rollout_backend_wake")

    def _confirm(self, hook: str, **arguments: object) -> None:
        if self._member.call(hook, **arguments) is False:
            raise self._member.wrong(hook, "False; it should do its work or raise")

    def _require(self, action: str, *states: State) -> None:
        if self._state not in states:
            raise self._out_of_turn(action)

    def _out_of_turn(self, action: str) -> RunError:
        what = f"cannot {action} while it is {self._state!r}"
        order = "start, generate, sleep, wake weights, load_weights, wake cache, generate, stop"
        return RunError(what, who=str(self._member.id), fix=f"keep to the order: {order}")

    def _fault(self, answer: object, request: Request, index: int, sampling: Sampling) -> str:
        if not isinstance(answer, Completion):
            return f"{shown(answer)}, not a Completion,"
        if (answer.request_id, answer.index) != (request.id, index):
            return f"the completion {answer.request_id}/{answer.index} where {request.id}/{index} belongs"
        if answer.finish_reason not in _REASONS:
            return f"the finish reason {answer.finish_reason!r}"
        if answer.weight_version != self.version:
            return f"weight version {answer.weight_version} with version {self.version} in use"
        if len(answer.token_ids) > sampling.max_new_tokens:
            return f"{len(answer.token_ids)} tokens with at most {sampling.max_new_tokens} allowed"
        if not all(type(token) is int and token >= 0 for token in answer.token_ids):
            return "token ids that are not plain integers from 0"
        return self._logprob_fault(answer, sampling)

    def _logprob_fault(self, answer: Completion, sampling: Sampling) -> str:
        if answer.logprobs is None:
            wanted = sampling.logprobs and self.info.logprobs != "none"
            return "no log-probabilities" if wanted else ""
        if len(answer.logprobs) != len(answer.token_ids):
            return f"{len(answer.logprobs)} log-probabilities for {len(answer.token_ids)} tokens"
        if not all(map(math.isfinite, answer.logprobs)):
            return "a log-probability that is not finite"
        return ""


class _Watched:
    """Passes named tensors on, and knows whether all were taken."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tensors = tensors
        self.taken = 0
        self.exhausted = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in self._tensors:
            self.taken += 1
            yield pair
        self.exhausted = True
