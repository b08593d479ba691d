"""Every check of the rollout suite fails for an engine that has the fault it is there for."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from posttune import hookimpl
from posttune.errors import PluginCallError, PosttuneError, RunError
from posttune.facade import RolloutEngine
from posttune.pipeline import bind
from posttune.rollout.hf import HFBackend, HFConfig
from posttune.testing._rollout_bench import Bench
from posttune.testing.rollout_suite import RolloutSuite
from posttune.types import BackendInfo, Completion, Request, RolloutContext, Sampling

pytestmark = pytest.mark.slow

torch.set_num_threads(1)


class Answers(HFBackend):
    """The `hf` engine, with what it is asked and what it answers in the hands of a fault."""

    @hookimpl
    def rollout_backend_generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        asked, how = self.asked(list(requests), sampling)
        answers = super().rollout_backend_generate(asked, how)
        return self.answered(answers, list(requests), sampling)

    def asked(self, requests: list[Request], sampling: Sampling) -> tuple[list[Request], Sampling]:
        return requests, sampling

    def answered(
        self, answers: list[Completion], requests: list[Request], sampling: Sampling
    ) -> list[Completion]:
        return answers

    def hf(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        return HFBackend.rollout_backend_generate(self, requests, sampling)


def asking(change: Callable[[Request, Sampling], tuple[Request, Sampling]]) -> type[Answers]:
    """Every request, or how it is sampled, is another."""

    class Fault(Answers):
        def asked(self, requests, sampling):
            changed = [change(request, sampling) for request in requests]
            return [request for request, _ in changed], changed[0][1]

    return Fault


def answering(change: Callable[[Completion, Sampling], Completion]) -> type[Answers]:
    """Every answer is another."""

    class Fault(Answers):
        def answered(self, answers, requests, sampling):
            return [change(answer, sampling) for answer in answers]

    return Fault


def sampled(**fields: Any) -> type[Answers]:
    return asking(lambda request, sampling: (request, replace(sampling, **fields)))


def cut(answer: Completion, length: int, reason: str) -> Completion:
    logprobs = answer.logprobs and answer.logprobs[:length]
    return replace(answer, token_ids=answer.token_ids[:length], logprobs=logprobs, finish_reason=reason)


class Exchanged(Answers):
    def answered(self, answers, requests, sampling):
        moved = answers[1:] + answers[:1]
        return [
            replace(other, request_id=answer.request_id, index=answer.index)
            for answer, other in zip(answers, moved, strict=True)
        ]


class Overflows(Answers):
    """What does not fit into the batch gets the answer of the first."""

    def answered(self, answers, requests, sampling):
        return [
            answer if place < 8 else replace(answers[0], request_id=answer.request_id, index=answer.index)
            for place, answer in enumerate(answers)
        ]


class FailsOnNothing(Answers):
    def asked(self, requests, sampling):
        if not requests:
            raise RunError("no requests")
        return requests, sampling


class Unguarded(RolloutEngine):
    def generate(self, requests, sampling):
        return self._member.call("rollout_backend_generate", requests=requests, sampling=sampling)


def refuses_a_full_context(request: Request, sampling: Sampling) -> tuple[Request, Sampling]:
    if len(request.prompt_ids) + sampling.max_new_tokens >= 512:
        raise RunError("too long")
    return request, sampling


def cuts_prompts(request: Request, sampling: Sampling) -> tuple[Request, Sampling]:
    return replace(request, prompt_ids=request.prompt_ids[-(512 - sampling.max_new_tokens) :]), sampling


class IgnoresFirstEnd(Answers):
    def asked(self, requests, sampling):
        return requests, replace(sampling, eos_ids=frozenset())

    def answered(self, answers, requests, sampling):
        result = []
        for answer in answers:
            ends = [i for i, token in enumerate(answer.token_ids) if token in sampling.eos_ids and i > 0]
            result.append(cut(answer, ends[0] + 1, "stop") if ends else answer)
        return result


class StopsWithinTokens(Answers):
    """Each token is decoded by itself."""

    def asked(self, requests, sampling):
        return requests, replace(sampling, stop=())

    def answered(self, answers, requests, sampling):
        words = self._started()._tokenizer
        result = []
        for answer in answers:
            texts = [words.decode([token]) for token in answer.token_ids]
            ends = [i for i, text in enumerate(texts) if any(stop in text for stop in sampling.stop)]
            result.append(cut(answer, ends[0] + 1, "stop") if ends else answer)
        return result


class Forgetful(Answers):
    """Every call draws anew."""

    calls = 0

    def asked(self, requests, sampling):
        self.calls += 1
        return [replace(request, seed=request.seed + self.calls) for request in requests], sampling


class SameSamples(Answers):
    def answered(self, answers, requests, sampling):
        n = sampling.n
        return [replace(answers[i - i % n], index=answer.index) for i, answer in enumerate(answers)]


class SeedsByPlace(Answers):
    def asked(self, requests, sampling):
        return [replace(request, seed=request.seed + i) for i, request in enumerate(requests)], sampling


def shifted(answer: Completion, sampling: Sampling) -> Completion:
    return replace(answer, logprobs=answer.logprobs and answer.logprobs[1:] + answer.logprobs[:1])


def scaled(answer: Completion, sampling: Sampling) -> Completion:
    """As if the temperature had been left out."""
    wrong = tuple(value * (sampling.temperature or 1) for value in answer.logprobs or ())
    return replace(answer, logprobs=wrong if answer.logprobs else None)


class Wholly(Answers):
    """Truncated sampling with the log-probabilities of the whole distribution."""

    def answered(self, answers, requests, sampling):
        plain = replace(sampling, top_p=1.0, top_k=0, n=1, max_new_tokens=1)
        return [
            replace(answer, logprobs=tuple(value - 0.05 for value in answer.logprobs or ()))
            if plain != sampling
            else answer
            for answer in answers
        ]


class Loads(HFBackend):
    """The `hf` engine with a copy of the model, and the tensors in the hands of a fault."""

    @hookimpl
    def rollout_backend_start(self, context: RolloutContext) -> BackendInfo:
        return super().rollout_backend_start(replace(context, live_model=None))

    @hookimpl
    def rollout_backend_load_weights(self, tensors: Iterable[Any], version: int, adapter: Any) -> bool:
        pairs = self.given([(name, tensor.clone()) for name, tensor in tensors])
        if pairs:
            super().rollout_backend_load_weights(pairs, version, adapter)
        self._started()._version = version
        return True

    def given(self, pairs: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        return pairs


class Stale(Loads):
    def given(self, pairs):
        return []


class KeepsNorms(Loads):
    def given(self, pairs):
        own = self._started()._model.state_dict()
        return [(name, own[name].clone() if "norm" in name else tensor) for name, tensor in pairs]


class Noisy(Loads):
    def given(self, pairs):
        return [(name, tensor + 0.02 * torch.randn_like(tensor)) for name, tensor in pairs]


class Lenient(Loads):
    """Takes what fits and passes over the rest."""

    def given(self, pairs):
        own = dict(self._started()._model.state_dict())
        fitting = {name: tensor for name, tensor in pairs if name in own and own[name].shape == tensor.shape}
        return list((own | fitting).items())


class Hoards(Loads):
    """Of new pages: what the allocator has left over from before would not show."""

    def given(self, pairs):
        room = mmap.mmap(-1, 1 << 20)
        room.write(bytes(1 << 20))
        self.__dict__.setdefault("kept", []).append(room)
        return pairs


class WrongVersion(Loads):
    def given(self, pairs):
        self._started()._version = 99
        return pairs

    @hookimpl
    def rollout_backend_load_weights(self, tensors, version, adapter):
        return super().rollout_backend_load_weights(tensors, version - 1, adapter)


class Secretive(HFBackend):
    """Computes with the trainer's module and does not say so."""

    @hookimpl
    def rollout_backend_start(self, context: RolloutContext) -> BackendInfo:
        return replace(super().rollout_backend_start(context), shares_weights=False)


class OldSums(HFBackend):
    @hookimpl
    def rollout_backend_checksums(self):
        self.sums = getattr(self, "sums", None) or super().rollout_backend_checksums()
        return self.sums


class NoSums(HFBackend):
    @hookimpl
    def rollout_backend_checksums(self):
        return {}


class KeepsAnswers(Answers):
    """A prefix cache that survives a load."""

    @hookimpl
    def rollout_backend_generate(self, requests, sampling):
        known = self.__dict__.setdefault("known", {})
        answers = []
        for request in requests:
            if request not in known:
                known[request] = self.hf([request], sampling)
            answers += known[request]
        return [replace(answer, weight_version=self._started()._version) for answer in answers]


class Sleeper(HFBackend):
    @hookimpl
    def rollout_backend_start(self, context):
        return replace(super().rollout_backend_start(context), sleep=True)

    @hookimpl
    def rollout_backend_sleep(self):
        own = self._started()._model.state_dict()
        self.kept = {name: tensor.clone() for name, tensor in own.items()}
        return True

    @hookimpl
    def rollout_backend_wake(self, part):
        if part == "cache":
            self._started()._model.load_state_dict(self.kept)
        return True


class Reseeds(HFBackend):
    @hookimpl
    def rollout_backend_start(self, context):
        torch.manual_seed(context.seed)
        random.seed(context.seed)
        return super().rollout_backend_start(context)


def drawing(answer: Completion, sampling: Sampling) -> Completion:
    torch.rand(1)
    return answer


def printing(answer: Completion, sampling: Sampling) -> Completion:
    print("generating")
    return answer


def writing(answer: Completion, sampling: Sampling) -> Completion:
    os.write(1, b"a library in C writes past sys.stdout")
    return answer


class Logs(Answers):
    """Its logger took standard output as it was at the start."""

    @hookimpl
    def rollout_backend_start(self, context: RolloutContext) -> BackendInfo:
        self.stream = sys.stdout
        return super().rollout_backend_start(context)

    def answered(self, answers, requests, sampling):
        print("generating", file=self.stream)
        return answers


class Untied(HFBackend):
    """The head keeps a copy of the embedding that it was tied to."""

    @hookimpl
    def rollout_backend_start(self, context):
        info = super().rollout_backend_start(context)
        model = self._started()._model
        head, weight = model.get_output_embeddings(), model.get_input_embeddings().weight
        head.register_forward_pre_hook(lambda module, args: None)
        kept = weight.detach().clone()
        head.forward = lambda hidden: torch.nn.functional.linear(hidden, kept)
        return info


class WithProcess(HFBackend):
    """Has a process, and leaves it behind."""

    @hookimpl
    def rollout_backend_start(self, context):
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        return super().rollout_backend_start(context)


class Undead(WithProcess):
    """Answers, in short, though its process is gone."""

    @hookimpl
    def rollout_backend_generate(self, requests, sampling):
        answers = super().rollout_backend_generate(requests[:1], replace(sampling, n=1, max_new_tokens=2))
        return [replace(answers[0], request_id=r.id, index=k) for r in requests for k in range(sampling.n)]

    @hookimpl
    def rollout_backend_stop(self):
        self.process.kill()
        self.process.wait()
        return True


class Mortal(Undead):
    """The right way."""

    @hookimpl
    def rollout_backend_generate(self, requests, sampling):
        answers = super().rollout_backend_generate(requests, sampling)
        if self.process.poll() is not None:
            raise RunError("the engine's process was killed")
        return answers


FAULTS: dict[str, list[tuple[str, Any]]] = {
    "test_n_answers_to_each_request_in_order": [("exchanged", Exchanged)],
    "test_greedy_is_the_likeliest_token": [
        ("sampled", sampled(temperature=1.0)),
        ("log-probabilities of 0", answering(lambda a, s: replace(a, logprobs=(0.0,) * len(a.token_ids)))),
    ],
    "test_no_requests_no_answers": [("needs one", FailsOnNothing)],
    "test_every_token_that_is_asked_for": [
        ("one short", answering(lambda a, s: cut(a, s.max_new_tokens - 1, "length"))),
        ("one more", asking(lambda r, s: (r, replace(s, max_new_tokens=s.max_new_tokens + 1)))),
        ("always a stop", answering(lambda a, s: replace(a, finish_reason="stop"))),
    ],
    "test_longest_prompt": [("refuses", asking(refuses_a_full_context)), ("cuts", asking(cuts_prompts))],
    "test_empty_prompt_is_refused_by_name": [
        ("fills in", asking(lambda r, s: (replace(r, prompt_ids=r.prompt_ids or (0,)), s))),
    ],
    "test_every_token_id_is_taken": [
        (
            "drops special tokens",
            asking(lambda r, s: (replace(r, prompt_ids=tuple(t for t in r.prompt_ids if t > 2)), s)),
        ),
    ],
    "test_more_requests_than_run_at_once": [("overflows", Overflows)],
    "test_an_end_token_ends_and_is_kept": [
        (
            "swallows it",
            answering(lambda a, s: cut(a, len(a.token_ids) - 1, "stop") if a.finish_reason == "stop" else a),
        ),
        ("only one", asking(lambda r, s: (r, replace(s, eos_ids=frozenset(sorted(s.eos_ids)[:1]))))),
    ],
    "test_only_the_end_tokens_of_the_request_end": [
        ("the model's own too", asking(lambda r, s: (r, replace(s, eos_ids=s.eos_ids | {2})))),
    ],
    "test_an_end_token_at_once": [("at least one", IgnoresFirstEnd)],
    "test_the_last_token_may_be_the_end": [
        (
            "length first",
            answering(
                lambda a, s: replace(a, finish_reason="length") if len(a.token_ids) == s.max_new_tokens else a
            ),
        ),
    ],
    "test_stop_strings": [
        ("ignored", sampled(stop=())),
        (
            "cut off",
            answering(lambda a, s: cut(a, len(a.token_ids) - 1, "stop") if a.finish_reason == "stop" else a),
        ),
    ],
    "test_stop_strings_over_bytes": [("token by token", StopsWithinTokens)],
    "test_a_seed_decides_the_answer": [
        ("forgetful", Forgetful),
        ("one for all samples", SameSamples),
        ("one for all requests", asking(lambda r, s: (replace(r, seed=0), s))),
        ("by id", asking(lambda r, s: (replace(r, seed=hash(r.id)), s))),
    ],
    "test_an_answer_is_its_own": [("by place", SeedsByPlace)],
    "test_tokens_have_the_models_frequencies": [
        ("temperature ignored", sampled(temperature=1.0)),
        ("truncated", sampled(top_k=2)),
    ],
    "test_log_probabilities_are_the_trainers": [
        ("before the temperature", answering(scaled)),
        ("one place off", answering(shifted)),
    ],
    "test_truncated_sampling": [
        ("not truncated", sampled(top_k=0, top_p=1.0)),
        ("no top-p", sampled(top_p=1.0)),
        ("no top-k", sampled(top_k=0)),
        ("of the whole distribution", Wholly),
    ],
    "test_log_probabilities_can_be_left_out": [("always", sampled(logprobs=True))],
    "test_new_weights_count_after_a_load_and_never_before": [
        ("stale", Stale),
        ("secretive", Secretive),
        ("wrong version", WrongVersion),
    ],
    "test_every_tensor_arrives": [("stale", Stale), ("old sums", OldSums), ("none", NoSums)],
    "test_one_tensor_that_changes_is_seen": [("norms are kept", KeepsNorms)],
    "test_no_stale_cache": [("answers are kept", KeepsAnswers)],
    "test_equal_weights_change_nothing": [("noise", Noisy)],
    "test_other_weights_are_refused": [("lenient", Lenient)],
    "test_merged_adapters": [("stale", Stale)],
    "test_memory_stays_flat_over_loads": [("hoards", Hoards)],
    "test_sleep_and_wake": [("wakes with old weights", Sleeper)],
    "test_the_trainers_chance_is_untouched": [("draws", answering(drawing)), ("reseeds", Reseeds)],
    "test_nothing_on_standard_output": [
        ("prints", answering(printing)),
        ("writes", answering(writing)),
        ("logs", Logs),
    ],
    "test_stop": [("leaves a process", WithProcess)],
    "test_tied_embeddings": [("a head of its own", Untied)],
    "test_learning_rate_0": [("noise", Noisy)],
    "test_longer_is_better": [("stale", Stale)],
    "test_a_killed_engine_ends_the_run": [("goes on", Undead)],
}


class Faulty(RolloutSuite):
    """The suite over an engine that is made of a class."""

    __test__ = False
    backend = "hf"
    deadline_s = 2.0

    def __init__(self, kind: type[HFBackend]) -> None:
        self.kind = kind
        self.live = kind is Secretive
        self.own_process = issubclass(kind, WithProcess)
        self.sleeps = issubclass(kind, Sleeper)
        self.engine = Unguarded if kind is FailsOnNothing else RolloutEngine

    def make(self) -> RolloutEngine:
        return self.engine(bind("rollout_backend", self.kind(HFConfig()), "hf"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults") / "model"


@pytest.mark.parametrize(
    ("check", "kind"),
    [pytest.param(check, kind, id=f"{check}-{what}") for check, all in FAULTS.items() for what, kind in all],
)
def test_a_fault_is_found(check: str, kind: type[HFBackend], folder: Path, monkeypatch) -> None:
    suite = Faulty(kind)
    monkeypatch.setattr("posttune.trainer.rl.build_rollout", lambda ref: suite.make())
    bench = Bench(suite, folder)
    try:
        with pytest.raises((AssertionError, PosttuneError, pytest.fail.Exception)) as caught:
            getattr(suite, check)(bench)
        assert not isinstance(caught.value, PluginCallError), "the fault itself is faulty"
    finally:
        for process in bench.processes:
            if process.is_running():
                process.kill()
        bench.forget()


@pytest.mark.parametrize(
    ("check", "kind"),
    [
        ("test_a_seed_decides_the_answer", Forgetful),
        ("test_equal_weights_change_nothing", Noisy),
        ("test_new_weights_count_after_a_load_and_never_before", Stale),
        ("test_sleep_and_wake", Sleeper),
    ],
)
def test_a_fault_is_found_where_rounding_depends_on_the_batch(
    check: str, kind: type[HFBackend], folder: Path
) -> None:
    suite = Faulty(kind)
    suite.batch_independent = False
    bench = Bench(suite, folder)
    try:
        with pytest.raises((AssertionError, PosttuneError)) as caught:
            getattr(suite, check)(bench)
        assert not isinstance(caught.value, PluginCallError), "the fault itself is faulty"
    finally:
        bench.forget()


def test_every_check_has_a_fault() -> None:
    assert set(FAULTS) == {name for name in dir(RolloutSuite) if name.startswith("test_")}


def test_a_process_that_dies_is_told_of(folder: Path) -> None:
    suite = Faulty(Mortal)
    bench = Bench(suite, folder)
    suite.test_a_killed_engine_ends_the_run(bench)
    bench.forget()
