"""The `hf` engine through its facade: what it answers, and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from posttune.config.models import LoraConfig, PluginRef
from posttune.data.packing import TokenSequence, collate, plan
from posttune.errors import DataError, UserError
from posttune.facade import RolloutEngine, build_rollout
from posttune.models.forward import response_logprobs
from posttune.models.load import new_model
from posttune.models.lora import apply_lora, merge
from posttune.models.tokenizer import byte_tokenizer
from posttune.rollout._generate import for_generation
from posttune.types import Completion, Request, Resources, RolloutContext, Sampling

PROMPTS = ["a", "12+34=", "hello", "The quick brown fox", "x" * 40, "hello"]
EOS = frozenset(range(50, 90))  # of 259: about one token in seven ends an answer of a random model
FIELDS = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}


def small_model(seed: int = 0, **fields: object) -> torch.nn.Module:
    model = new_model({**FIELDS, **fields}, byte_tokenizer(), seed=seed)
    with torch.no_grad():  # a random model answers almost uniformly: sharpen it
        model.get_output_embeddings().weight.mul_(15)
    return model


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return small_model()


def requests(prompts: list[str] = PROMPTS) -> list[Request]:
    tokenizer = byte_tokenizer()
    return [Request(f"r{i}", tuple(tokenizer.encode(text)), seed=100 + i) for i, text in enumerate(prompts)]


def engine(model: torch.nn.Module | None, **options: object) -> RolloutEngine:
    rows = options.pop("max_sequences", None)
    built = build_rollout(PluginRef(name="hf", options=options))
    context = RolloutContext(
        model_path=None,
        tokenizer=byte_tokenizer(),
        dtype="float32",
        device="cpu",
        seed=0,
        max_length=128,
        resources=Resources(max_sequences=rows),
        live_model=model,
    )
    built.start(context)
    return built


def tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def test_n_completions_per_request_in_order(model):
    answers = engine(model).generate(requests(), Sampling(n=3, max_new_tokens=4))
    assert [(a.request_id, a.index) for a in answers] == [(f"r{i}", j) for i in range(6) for j in range(3)]
    assert {a.weight_version for a in answers} == {0}
    assert {len(a.token_ids) for a in answers} == {4}
    assert {a.finish_reason for a in answers} == {"length"}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(n=3, max_new_tokens=8, eos_ids=EOS, temperature=0.7),
        Sampling(n=3, max_new_tokens=8, eos_ids=EOS, top_k=5, top_p=0.8),
        Sampling(n=1, max_new_tokens=8, eos_ids=EOS, temperature=0),
    ],
    ids=["temperature", "truncated", "greedy"],
)
@pytest.mark.parametrize("fields", [{}, {"vocab_size": 1500}], ids=["flat", "blocks"])
def test_an_answer_does_not_depend_on_what_shares_its_batch(sampling, fields):
    model = small_model(**fields)
    together = engine(model).generate(requests(), sampling)
    for rows in (1, 5):
        apart = engine(model, max_sequences=rows).generate(requests()[::-1], sampling)
        by_key = {(a.request_id, a.index): a for a in apart}
        for answer in together:
            other = by_key[answer.request_id, answer.index]
            assert other.token_ids == answer.token_ids
            assert other.finish_reason == answer.finish_reason
            torch.testing.assert_close(
                torch.tensor(other.logprobs), torch.tensor(answer.logprobs), atol=1e-5, rtol=0
            )


def test_small_memory_makes_small_batches(model):
    wanted = engine(model).generate(requests(), Sampling(n=8, max_new_tokens=6))
    assert tokens(engine(model, cache_mb=1).generate(requests(), Sampling(n=8, max_new_tokens=6))) == tokens(
        wanted
    )


def test_seeds_decide_the_tokens(model):
    sampling = Sampling(n=4, max_new_tokens=8)
    first, again = (engine(model).generate(requests(), sampling) for _ in range(2))
    assert tokens(first) == tokens(again)
    assert len(set(tokens(first)[:4])) == 4, "samples of one request differ"
    other = [dataclasses.replace(request, seed=request.seed + 1) for request in requests()]
    assert tokens(engine(model).generate(other, sampling)) != tokens(first)
    equal = [dataclasses.replace(request, seed=7) for request in (requests()[2], requests()[5])]
    a, b = (tokens(engine(model).generate([request], sampling)) for request in equal)
    assert a == b, "the same prompt and seed: the same answers, whatever the id"


def test_a_longer_limit_only_continues_an_answer(model):
    short, long = (engine(model).generate(requests(), Sampling(max_new_tokens=k)) for k in (3, 9))
    assert [ids[:3] for ids in tokens(long)] == tokens(short)


def test_every_eos_ends_an_answer_and_is_its_last_token(model):
    answers = engine(model).generate(requests(), Sampling(n=12, max_new_tokens=16, eos_ids=EOS))
    stopped = [answer for answer in answers if answer.finish_reason == "stop"]
    assert len({answer.token_ids[-1] for answer in stopped}) > 5
    for answer in answers:
        assert not EOS & set(answer.token_ids[:-1])
        assert (answer.token_ids[-1] in EOS) == (answer.finish_reason == "stop")
        assert answer.finish_reason == "stop" or len(answer.token_ids) == 16
        assert len(answer.logprobs) == len(answer.token_ids)
    assert 1 in {len(answer.token_ids) for answer in answers}, "some answers are an EOS and nothing else"


def test_pad_token_inside_an_answer_is_a_token_like_any_other(model):
    pad = byte_tokenizer().pad_token_id
    answers = engine(model).generate(requests(), Sampling(n=4, max_new_tokens=6, eos_ids=frozenset({pad})))
    for answer in answers:
        assert (answer.finish_reason == "stop") == (pad in answer.token_ids)


def test_stop_strings_end_an_answer_with_the_token_that_completes_them(model):
    tokenizer = byte_tokenizer()
    free = engine(model).generate(requests(), Sampling(n=2, max_new_tokens=30))
    text = tokenizer.decode(free[3].token_ids[4:6])
    answers = engine(model).generate(
        requests(), Sampling(n=2, max_new_tokens=30, stop=("no such text", text))
    )
    assert answers[3].finish_reason == "stop"
    for answer, unstopped in zip(answers, free, strict=True):
        assert unstopped.token_ids[: len(answer.token_ids)] == answer.token_ids
        body = tokenizer.decode(answer.token_ids)
        assert (text in body) == (answer.finish_reason == "stop")
        assert text not in tokenizer.decode(answer.token_ids[:-1])


def test_a_stop_string_of_several_characters_and_bytes(model):
    tokenizer = byte_tokenizer()
    request = requests(["hello"])[0]
    ids = tokenizer.encode("ab→cd")
    forced = _Forced(model, ids)
    answers = engine(forced).generate([request], Sampling(max_new_tokens=7, stop=("b→c",)))
    assert tokenizer.decode(answers[0].token_ids) == "ab→c"


class _Forced(torch.nn.Module):
    """A model that answers with the ids that it is told."""

    def __init__(self, model: torch.nn.Module, ids: list[int]) -> None:
        super().__init__()
        self.model, self.ids, self.config, self.dtype = model, ids, model.config, torch.float32
        self.step = 0

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.model.get_input_embeddings()

    def forward(
        self, input_ids, cache, attention_mask=None, position_ids=None, use_cache=True, return_dict=True
    ):
        out = self.model(input_ids, cache=cache, attention_mask=attention_mask, position_ids=position_ids)
        out.logits[..., self.ids[self.step]] += 1e4
        self.step += 1
        return out


def test_stop_strings_that_cannot_be_are_refused(model):
    with pytest.raises(UserError, match="empty stop string"):
        engine(model).generate(requests(), Sampling(max_new_tokens=2, stop=("",)))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_equal_the_trainers(model, temperature):
    answers = engine(model).generate(
        requests(), Sampling(n=3, max_new_tokens=10, temperature=temperature, eos_ids=EOS)
    )
    _assert_trainer_agrees(model, answers, temperature)


def test_greedy_log_probabilities_are_those_of_temperature_1(model):
    _assert_trainer_agrees(
        model, engine(model).generate(requests(), Sampling(max_new_tokens=8, temperature=0)), 1.0
    )


def _assert_trainer_agrees(model, answers, temperature):
    prompts = {request.id: request.prompt_ids for request in requests()}
    sequences = [
        TokenSequence(prompts[a.request_id] + a.token_ids, len(prompts[a.request_id])) for a in answers
    ]
    for micro in plan([len(s.ids) for s in sequences], micro_batch_tokens=256):
        batch = collate(sequences, micro)
        with torch.no_grad():
            logp = response_logprobs(model, batch, temperature=temperature).logp
        wanted = torch.tensor([value for i in batch.order for value in answers[i].logprobs])
        torch.testing.assert_close(logp, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"model_type": "qwen2", "tie_word_embeddings": True},
        {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8},
    ],
)
def test_greedy_equals_transformers_generate(kind):
    model = small_model(**kind)
    answers = engine(model).generate(requests(), Sampling(max_new_tokens=12, temperature=0, eos_ids=EOS))
    for request, answer in zip(requests(), answers, strict=True):
        ids = torch.tensor([request.prompt_ids])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=sorted(EOS),
            pad_token_id=0,
        )
        assert tuple(out[0, ids.shape[1] :].tolist()) == answer.token_ids


def test_log_probabilities_can_be_left_out(model):
    assert (
        engine(model).generate(requests()[:1], Sampling(max_new_tokens=2, logprobs=False))[0].logprobs is None
    )


def test_truncated_sampling_reports_the_truncated_distribution(model):
    one = engine(model).generate(requests(), Sampling(max_new_tokens=5, top_k=1))
    assert all(value == 0 for answer in one for value in answer.logprobs)
    greedy = engine(model).generate(requests(), Sampling(max_new_tokens=5, temperature=0))
    assert tokens(one) == tokens(greedy)


def test_one_prefill_a_prompt_and_finished_rows_leave(model):
    shapes: list[tuple[int, int]] = []
    handle = model.get_input_embeddings().register_forward_hook(
        lambda _m, args, _o: shapes.append(tuple(args[0].shape))
    )
    try:
        answers = engine(model).generate(requests(), Sampling(n=12, max_new_tokens=16, eos_ids=EOS))
    finally:
        handle.remove()
    assert shapes[0] == (6, 40), "six prompts, padded to the longest"
    assert all(width == 1 for _, width in shapes[1:])
    rows = [rows for rows, _ in shapes[1:]]
    assert rows == sorted(rows, reverse=True)
    computed, needed = sum(rows), sum(len(answer.token_ids) - 1 for answer in answers)
    assert needed <= computed <= 1.1 * needed


def test_modes_and_checkpointing_are_as_before():
    model = small_model()
    model.train()
    model.gradient_checkpointing_enable()
    model.model.layers[1].eval()
    before = [module.training for module in model.modules()]
    engine(model).generate(requests(), Sampling(max_new_tokens=3))
    assert [module.training for module in model.modules()] == before
    assert model.is_gradient_checkpointing
    assert torch.is_grad_enabled()
    model(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad is not None


def test_modes_are_as_before_after_a_failure():
    model = small_model().train()
    with pytest.raises(IndexError), for_generation(model):
        model(torch.tensor([[10**6]]))
    assert all(module.training for module in model.modules())


def test_lora_answers_as_the_merged_model():
    plain = small_model()
    adapted = apply_lora(small_model(), LoraConfig(rank=4, alpha=64.0), seed=1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    sampling = Sampling(n=4, max_new_tokens=8)
    live = engine(adapted).generate(requests(), sampling)
    assert tokens(live) != tokens(engine(plain).generate(requests(), sampling))
    assert tokens(engine(merge(adapted)).generate(requests(), sampling)) == tokens(live)


def test_bfloat16_answers_are_finite():
    model = small_model().to(torch.bfloat16)
    answers = engine(model).generate(requests(), Sampling(n=2, max_new_tokens=6))
    assert all(value <= 0 for answer in answers for value in answer.logprobs)


@pytest.mark.parametrize(
    ("prompt", "length", "message"),
    [
        ((), 4, r"request 'bad': its prompt has no tokens"),
        (
            (5,) * 125,
            4,
            r"request 'bad': its prompt of 125 tokens and max_new_tokens 4 exceed the longest sequence, 128",
        ),
    ],
)
def test_prompts_that_cannot_be_answered_are_refused_by_name(model, prompt, length, message):
    bad = Request("bad", prompt, 0)
    with pytest.raises(DataError, match=message):
        engine(model).generate([*requests(), bad], Sampling(max_new_tokens=length))


def test_the_longest_prompt_that_fits_is_answered(model):
    request = Request("long", (5,) * 124, 0)
    assert len(engine(model).generate([request], Sampling(max_new_tokens=4))[0].token_ids) == 4


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        (Resources(tensor_parallel_size=2), "tensor_parallel_size"),
        (Resources(memory_share=0.5), "memory_share"),
    ],
)
def test_what_it_cannot_use_it_says(model, caplog, resources, message):
    built = build_rollout(PluginRef(name="hf"))
    context = RolloutContext(None, byte_tokenizer(), "float32", "cpu", 0, 128, resources, model)
    built.start(context)
    assert f"{message} is not used" in caplog.text


def test_no_requests_no_answers(model):
    assert engine(model).generate([], Sampling()) == []
