"""Checks of the rollout suite: what an engine answers, where an answer ends, and how tokens are drawn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from posttune.errors import UserError
from posttune.testing._rollout_base import GREEDY, LARGEST_GAP, RolloutChecks
from posttune.testing._rollout_bench import CONTEXT, ENDS, Bench, named, requests, tokens, truncated
from posttune.types import Completion, Request, Sampling


class AnswerChecks(RolloutChecks):
    """Of answers, ends and draws."""

    # --- what it answers ---------------------------------------------------------------------

    def test_n_answers_to_each_request_in_order(self, bench: Bench) -> None:
        """Request-major, each one the model's own answer to that very prompt."""
        asked = requests() + requests(("one", "two", "three", "four"), seed=300)
        asked = [replace(request, id=f"n{place}") for place, request in enumerate(asked)]
        answers = bench.answer(asked, replace(GREEDY, n=3))
        names = [(answer.request_id, answer.index) for answer in answers]
        assert names == [(request.id, index) for request in asked for index in range(3)]
        self.assert_greedy(bench, answers)

    def test_greedy_is_the_likeliest_token(self, bench: Bench) -> None:
        """At temperature 0 every token is the model's argmax, and the log-probability is its own."""
        answers = bench.answer(requests(), GREEDY)
        self.assert_greedy(bench, answers)
        self.assert_agrees(bench, answers, 0)

    def test_no_requests_no_answers(self, bench: Bench) -> None:
        """An empty list is answered with an empty list."""
        assert bench.answer([], GREEDY) == []

    def test_every_token_that_is_asked_for(self, bench: Bench) -> None:
        """Without an end an answer has max_new_tokens tokens exactly, one included."""
        for length in (1, 2, 33):
            answers = bench.answer(requests(), Sampling(n=2, max_new_tokens=length))
            assert {len(answer.token_ids) for answer in answers} == {length}
            assert {answer.finish_reason for answer in answers} == {"length"}

    def test_longest_prompt(self, bench: Bench) -> None:
        """Prompt and answer may fill the context to its last token; one more is refused by name."""
        prompt = tuple(3 + (7 * place) % 256 for place in range(CONTEXT - 4))
        fits, too_long = Request("fits", prompt, 1), Request("too-long", (*prompt, 5), 1)
        sampling = replace(GREEDY, max_new_tokens=4)
        (answer,) = bench.answer([fits], sampling)
        assert len(answer.token_ids) == 4
        self.assert_greedy(bench, [answer])
        with pytest.raises(UserError, match="too-long"):
            bench.answer([fits, too_long], sampling)

    def test_empty_prompt_is_refused_by_name(self, bench: Bench) -> None:
        """There is nothing to go on from; the message names the request."""
        with pytest.raises(UserError, match="nothing-there"):
            bench.answer([*requests()[:1], Request("nothing-there", (), 1)], GREEDY)

    def test_every_token_id_is_taken(self, bench: Bench) -> None:
        """Bytes that are no text, and special tokens inside a prompt, are tokens like any other."""
        asked = [Request("bytes", tuple(range(len(bench.tokenizer))), 3), Request("special", (1, 0, 2, 5), 3)]
        answers = bench.answer(asked, replace(GREEDY, n=1))
        self.assert_greedy(bench, answers)

    def test_more_requests_than_run_at_once(self, bench: Bench) -> None:
        """What does not fit waits, and nothing is lost or exchanged."""
        asked = requests([f"{number}=" for number in range(40)])
        answers = bench.answer(asked, replace(GREEDY, max_new_tokens=5))
        assert len(answers) == 40
        self.assert_greedy(bench, answers)

    # --- where it ends -----------------------------------------------------------------------

    def test_an_end_token_ends_and_is_kept(self, bench: Bench) -> None:
        """Each of a set of EOS tokens ends an answer and is its last token; none stands inside."""
        answers = bench.answer(requests(), Sampling(n=12, max_new_tokens=16, eos_ids=ENDS))
        ended = [answer for answer in answers if answer.finish_reason == "stop"]
        assert all(answer.token_ids for answer in ended)
        assert len({answer.token_ids[-1] for answer in ended}) > 3, "several of them occur"
        for answer in answers:
            assert not ENDS & set(answer.token_ids[:-1])
            assert (answer.token_ids[-1] in ENDS) == (answer.finish_reason == "stop")
            assert answer.finish_reason == "stop" or len(answer.token_ids) == 16
        self.assert_agrees(bench, answers, 1.0)

    def test_only_the_end_tokens_of_the_request_end(self, bench: Bench) -> None:
        """The model's own EOS is a token like any other unless the request names it."""
        prompt, chain = self.scripted(bench, "go", ["a", bench.tokenizer.eos_token_id, "b", "c", "d"])
        for ends, length, reason in ((frozenset(), 5, "length"), (frozenset({chain[2]}), 2, "stop")):
            (answer,) = bench.answer([prompt], replace(GREEDY, max_new_tokens=5, eos_ids=ends))
            assert answer.token_ids == tuple(chain[1 : length + 1])
            assert answer.finish_reason == reason

    def test_an_end_token_at_once(self, bench: Bench) -> None:
        """An answer may be an EOS and nothing else."""
        prompt, chain = self.scripted(bench, "go", [bench.tokenizer.eos_token_id])
        answers = bench.answer([prompt], replace(GREEDY, n=2, eos_ids=frozenset({chain[1]})))
        assert [answer.token_ids for answer in answers] == [(chain[1],)] * 2
        assert {answer.finish_reason for answer in answers} == {"stop"}

    def test_the_last_token_may_be_the_end(self, bench: Bench) -> None:
        """An EOS in the last place that max_new_tokens allows is a stop."""
        prompt, chain = self.scripted(bench, "go", ["a", "b", bench.tokenizer.eos_token_id])
        (answer,) = bench.answer([prompt], replace(GREEDY, max_new_tokens=3, eos_ids=frozenset({chain[3]})))
        assert answer.token_ids == tuple(chain[1:])
        assert answer.finish_reason == "stop"

    def test_stop_strings(self, bench: Bench) -> None:
        """The token that completes a stop string is the last one and is kept; others are not cut."""
        prompt, chain = self.scripted(bench, "go", list("abcdefghij"))
        for stop, length in ((("zz", "cde"), 5), (("a",), 1), (("ij",), 10), (("no",), 10)):
            (answer,) = bench.answer([prompt], replace(GREEDY, max_new_tokens=10, stop=stop))
            assert answer.token_ids == tuple(chain[1 : length + 1])
            assert len(answer.logprobs or ()) == length
            assert answer.finish_reason == ("length" if stop == ("no",) else "stop")

    def test_stop_strings_over_bytes(self, bench: Bench) -> None:
        """A character of several tokens is whole only with its last one; the prompt stops nothing."""
        prompt, chain = self.scripted(bench, "b→c, go", [*"ab→cd"])
        (answer,) = bench.answer([prompt], replace(GREEDY, max_new_tokens=7, stop=("b→",)))
        assert answer.token_ids == tuple(chain[1:6])
        assert answer.finish_reason == "stop"

    # --- how it draws ------------------------------------------------------------------------

    def test_a_seed_decides_the_answer(self, bench: Bench) -> None:
        """The same request again: the same answers; another index or seed: others. Its id plays no part."""
        sampling = Sampling(n=4, max_new_tokens=10)
        answers = bench.answer(requests(), sampling)
        self.assert_same(bench.answer(requests(), sampling), answers)
        self.assert_same(bench.answer(named(requests(), "other"), sampling), answers)
        first = tokens(answers)
        for place in range(0, len(first), 4):
            assert len(set(first[place : place + 4])) == 4, "the samples of one request differ"
        moved = tokens(bench.answer(requests(seed=700), sampling))
        assert all(a != b for a, b in zip(first, moved, strict=True))

    def test_an_answer_is_its_own(self, bench: Bench) -> None:
        """It does not depend on what is asked before it or beside it."""
        if not self.batch_independent:
            return
        sampling = Sampling(n=3, max_new_tokens=10, eos_ids=ENDS, temperature=0.8)
        together = tokens(bench.answer(requests(), sampling))
        for place, request in reversed(list(enumerate(requests()))):
            assert tokens(bench.answer([request], sampling)) == together[3 * place : 3 * place + 3]
        fewer = tokens(bench.answer(requests(), replace(sampling, n=1)))
        assert fewer == together[::3], "sample 0 is the same however many there are"

    def test_tokens_have_the_models_frequencies(self, bench: Bench) -> None:
        """Over many seeds the first token is drawn as often as the model says, at its temperature."""
        (request,) = requests(("hello",))
        asked = [replace(request, id=f"f{place}", seed=place) for place in range(25)]
        for temperature in (1.0, 0.5):
            answers = bench.answer(asked, Sampling(n=40, max_new_tokens=1, temperature=temperature))
            p = (bench.logits(answers[0])[0] / temperature).softmax(-1)
            counts = p.new_zeros(len(p))
            for (token,) in tokens(answers):
                counts[token] += 1
            often = p > 0.01
            spread = (p * (1 - p) * len(answers)).sqrt()
            assert bool(((counts - p * len(answers)).abs() < 5 * spread)[often].all())

    def test_log_probabilities_are_the_trainers(self, bench: Bench) -> None:
        """One a token, of the distribution that was sampled from, temperature included."""
        for temperature in (1.0, 0.6, 1.7):
            sampling = Sampling(n=4, max_new_tokens=24, temperature=temperature, eos_ids=ENDS)
            self.assert_agrees(bench, bench.answer(requests(), sampling), temperature)

    def test_truncated_sampling(self, bench: Bench) -> None:
        """Top-k and top-p, after the temperature: nothing that they exclude is drawn."""
        for top_k, top_p in ((5, 1.0), (0, 0.7), (8, 0.8)):
            sampling = Sampling(n=4, max_new_tokens=12, temperature=0.7, top_k=top_k, top_p=top_p)
            answers = bench.answer(requests(), sampling)
            for answer in answers if self.exact else []:
                self.assert_among(answer, truncated(bench.logits(answer), sampling))
        only = bench.answer(requests(), Sampling(max_new_tokens=12, top_k=1))
        self.assert_greedy(bench, only)

    def test_log_probabilities_can_be_left_out(self, bench: Bench) -> None:
        """Where they are not asked for there are none, and the tokens are the same."""
        sampling = Sampling(n=2, max_new_tokens=6)
        without = bench.answer(requests(), replace(sampling, logprobs=False))
        assert {answer.logprobs for answer in without} == {None}
        assert tokens(without) == tokens(bench.answer(requests(), sampling))

    def assert_among(self, answer: Completion, allowed: Tensor) -> None:
        """The tokens are not excluded, and have the log-probabilities that the backend claims."""
        chosen = allowed.log_softmax(-1).gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert bool(chosen.isfinite().all())
        if self.truncated_logprobs:
            assert float((chosen - torch.tensor(answer.logprobs)).abs().max()) < 10 * LARGEST_GAP
