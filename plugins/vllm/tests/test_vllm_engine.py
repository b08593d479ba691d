"""What vLLM alone has: options, adapters, a process that is shared, and starts that fail."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs the engine: make test-engines")

import torch
from peft import LoraConfig, get_peft_model
from posttune.errors import UserError
from posttune.testing.engine_tests import (
    ASKED,
    GREEDY,
    assert_likeliest,
    assert_mended,
    context,
    refused,
    started,
)
from posttune.testing.tiny import tiny_model
from posttune.types import Resources
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.engine

engine, start_refused = partial(started, "vllm"), partial(refused, "vllm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), hidden=256, heads=4)


def test_a_load_that_breaks_off_in_the_middle_is_mended_by_the_next(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with engine(folder, bucket_mb=1, verify="always") as made:
        assert_mended(made, model)


def test_log_probabilities_are_a_choice(folder: Path) -> None:
    with engine(folder, logprobs="never") as made:
        assert made.info.logprobs == "none"
        assert made.generate(ASKED, GREEDY)[0].logprobs is None
    with engine(folder, logprobs="always") as made:
        told = made.generate(ASKED, replace(GREEDY, logprobs=False))[0].logprobs
        assert told is not None
        assert len(told) == 8


def test_an_adapter_is_applied_and_replaced(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(folder)
    tuned = get_peft_model(base, LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"]))
    tuned.save_pretrained(tmp_path / "adapter")
    with engine(folder, lora_rank=8) as made:
        assert made.info.lora
        for version in (1, 2):
            with torch.no_grad():
                for name, parameter in tuned.named_parameters():
                    if "lora_" in name:
                        parameter.normal_(std=0.3)
            state = {
                name.replace(".default.", "."): t for name, t in tuned.state_dict().items() if "lora_" in name
            }
            made.load_weights(iter(state.items()), version, adapter=str(tmp_path / "adapter"))
            answers = made.generate(ASKED, GREEDY)
            assert {answer.weight_version for answer in answers} == {version}
            assert_likeliest(tuned, answers)
        with pytest.raises(UserError, match="adapter_config"):
            made.load_weights(iter(state.items()), 3, adapter=str(tmp_path))


def test_a_model_without_a_folder_is_served_from_the_live_one(folder: Path) -> None:
    live = AutoModelForCausalLM.from_pretrained(folder)
    tuned = get_peft_model(live, LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj"]))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    with engine(None, context(None, live_model=tuned)) as made:
        assert_likeliest(tuned, made.generate(ASKED, GREEDY))


def test_starts_that_fail_say_why(folder: Path, tmp_path: Path) -> None:
    small = tiny_model(tmp_path / "small", head_dim=16)
    assert "heads of 16" in str(start_refused(small))
    assert "no argument 'blok_size' (did you mean 'block_size'?)" in str(
        start_refused(folder, engine={"blok_size": 1})
    )
    assert "decided by" in str(start_refused(folder, engine={"max_model_len": 9}))
    assert "the model takes 2048" in str(start_refused(folder, context(folder, max_length=4096)))
    assert "runs on a CPU" in str(
        start_refused(folder, context(folder, resources=Resources(tensor_parallel_size=2)))
    )
    wrong = start_refused(folder, engine={"block_size": 16})
    assert "vLLM has no attention" in str(wrong)
    odd = tiny_model(tmp_path / "odd")
    config = json.loads((odd / "config.json").read_text("utf-8"))
    config |= {"architectures": ["NoSuchForCausalLM"], "model_type": "no_such"}
    (odd / "config.json").write_text(json.dumps(config), "utf-8")
    unknown = start_refused(odd)
    assert isinstance(unknown, UserError)
    assert "does not know this model" in str(unknown)


SHARED = """
import sys, torch
import torch.distributed as dist
from pathlib import Path
from posttune.config.models import PluginRef
from posttune.errors import UserError
from posttune.facade import build_rollout
from posttune.types import Request, RolloutContext, Sampling

folder = Path(sys.argv[1])

def made(**options):
    found = build_rollout(PluginRef(name="vllm", options=options))
    found.start(RolloutContext(folder, None, "float32", "cpu", 0, 64))
    return found

torch.set_num_threads(1)
first, second = made(process="inline"), made(process="inline")
assert torch.set_num_threads.__module__ != "vllm.v1.worker.cpu_worker"
torch.set_num_threads(2)
assert torch.get_num_threads() == 2
asked, greedy = [Request("a", (40, 41), 3)], Sampling(max_new_tokens=6)
answers = [each.generate(asked, greedy)[0].token_ids for each in (first, second)]
assert answers[0] == answers[1], "two engines side by side"
first.stop()
assert second.generate(asked, greedy)[0].token_ids == answers[0], "the other goes on"
second.stop()
assert not dist.is_initialized()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
third = made(process="inline")
third.stop()
assert dist.is_initialized(), "the trainer's own group stays"
x = torch.compile(lambda v: v + 1, backend="eager")(torch.ones(1))
for _ in range(2):
    try:
        made(process="inline", engine={"block_size": 16})
    except UserError as error:
        print(str(error).splitlines()[0])
other = made()
print(other.generate(asked, greedy)[0].token_ids == answers[0])
other.stop()
"""


def test_an_engine_in_this_process_leaves_no_trace(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHARED, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second, last = done.stdout.splitlines()
    assert "vLLM has no attention" in first
    assert "an earlier start of vLLM failed in this process" in second
    assert last == "True", "a process of its own still works"


def test_the_tokenizer_of_the_run_is_the_one_that_finds_stop_strings(folder: Path) -> None:
    words = AutoTokenizer.from_pretrained(folder)
    with engine(folder, context(folder, tokenizer=words)) as made:
        free = made.generate(ASKED[:1], GREEDY)[0]
        text = words.decode(free.token_ids[2:3])
        if text.isprintable() and text not in words.decode(free.token_ids[:2]):
            (cut,) = made.generate(ASKED[:1], replace(GREEDY, stop=(text,)))
            assert cut.token_ids == free.token_ids[:3]
    with engine(folder) as made, pytest.raises(UserError, match="need a tokenizer"):
        made.generate(ASKED, replace(GREEDY, stop=("x",)))
