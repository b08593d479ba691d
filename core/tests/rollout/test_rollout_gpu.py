"""The `hf` engine on a GPU: the promises of the CPU, to the rounding of the device."""

from __future__ import annotations

import pytest
import torch
from posttune.config.models import PluginRef
from posttune.data.packing import TokenSequence, collate, plan
from posttune.facade import RolloutEngine, build_rollout
from posttune.models.forward import response_logprobs
from posttune.models.load import new_model
from posttune.models.params import named_hf_tensors
from posttune.models.tokenizer import byte_tokenizer
from posttune.testing.tiny import tiny_model
from posttune.types import Request, Resources, RolloutContext, Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

REQUESTS = [Request(str(i), tuple(range(40, 43 + 3 * i)), i) for i in range(12)]
SAMPLING = Sampling(n=4, max_new_tokens=24, temperature=0.7, eos_ids=frozenset(range(50, 54)))
GAP = {"float32": 1e-4, "bfloat16": 0.3}  # of log-probabilities, engine against trainer


def model(dtype: str) -> torch.nn.Module:
    fields = {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return new_model(fields, byte_tokenizer(), seed=0).to("cuda", getattr(torch, dtype))


def start(live: torch.nn.Module | None, dtype: str, rows: int | None = None, folder=None) -> RolloutEngine:
    engine = build_rollout(PluginRef(name="hf"))
    resources = Resources(max_sequences=rows)
    engine.start(RolloutContext(folder, byte_tokenizer(), dtype, "cuda", 0, 128, resources, live))
    return engine


def test_an_answer_does_not_depend_on_what_shares_its_batch():
    policy = model("float32")
    wanted = start(policy, "float32").generate(REQUESTS, SAMPLING)
    got = start(policy, "float32", rows=5).generate(REQUESTS, SAMPLING)
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in wanted]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probabilities_equal_the_trainers(dtype):
    policy = model(dtype)
    answers = start(policy, dtype).generate(REQUESTS, SAMPLING)
    prompts = {request.id: request.prompt_ids for request in REQUESTS}
    sequences = [
        TokenSequence(prompts[answer.request_id] + answer.token_ids, len(prompts[answer.request_id]))
        for answer in answers
    ]
    for micro in plan([len(sequence.ids) for sequence in sequences], micro_batch_tokens=2048):
        batch = collate(sequences, micro, "cuda")
        with torch.no_grad():
            logp = response_logprobs(policy, batch, temperature=0.7).logp.cpu()
        wanted = torch.tensor([value for i in batch.order for value in answers[i].logprobs])
        torch.testing.assert_close(logp, wanted, atol=GAP[dtype], rtol=0)


def test_a_copy_takes_weights_from_the_device(tmp_path):
    engine = start(None, "float32", folder=tiny_model(tmp_path))
    other = start(None, "float32", folder=tiny_model(tmp_path / "other", seed=1))
    before = engine.generate(REQUESTS, SAMPLING)
    source = new_source(tmp_path / "other")
    engine.load_weights(named_hf_tensors(source), version=1)
    assert engine.checksums() == other.checksums()
    after = [answer.token_ids for answer in engine.generate(REQUESTS, SAMPLING)]
    assert after == [answer.token_ids for answer in other.generate(REQUESTS, SAMPLING)]
    assert after != [answer.token_ids for answer in before]


def new_source(folder) -> torch.nn.Module:
    from posttune.checkpoint.sources import open_source

    return open_source(folder).load_merged(dtype=torch.float32).to("cuda")
