"""What is found before an engine starts; no engine is needed to find it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from posttune.engines.facts import Facts
from posttune.engines.problems import Told
from posttune.errors import PosttuneError, RunError, UserError
from posttune.testing.engine_tests import pretend
from posttune.types import Resources, RolloutContext, Sampling
from posttune_sglang import SglangBackend, SglangOptions, adapters, arguments, environment, shim
from posttune_sglang.installed import SGLANG
from posttune_sglang.prepare import check, served_folder
from posttune_sglang.problems import EXPLAINER
from posttune_sglang.sampling import parameters
from pydantic import ValidationError

ARGUMENTS = """
class ServerArgs:
    model_path: str = ""
    chunked_prefill_size: int | None = None
"""


def context(device: str = "cpu", **fields: Any) -> RolloutContext:
    return RolloutContext(None, None, "float32", device, 0, fields.pop("max_length", 128), **fields)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """An environment with these distributions and no other engine or torch."""

    def install(versions: Mapping[str, str], requires: list[str] | None = None) -> None:
        asked = {name: requires or [] for name in versions}
        pretend(monkeypatch, versions, asked, tmp_path / "sglang", {"srt/server_args.py": ARGUMENTS})

    return install


@pytest.mark.parametrize(
    ("versions", "device", "said"),
    [
        ({}, "cpu", r"SGLang is not installed.*cpu file of the plugin's folder constraints"),
        ({}, "cuda:0", r"not installed.*posttune-sglang\[engine\]"),
        ({"sglang": "0.5.16"}, "cuda", "sglang 0.5.16 is installed; versions 0.5.17 to 0.5.23"),
        ({"sglang": "0.5.24"}, "cpu", "versions 0.5.17 to 0.5.23"),
        (
            {"sglang": "0.5.17", "torch": "2.13.0+cu130"},
            "cuda",
            "built for torch ==2.11.0, and 2.13.0.cu130 is installed.*may have replaced torch",
        ),
    ],
)
def test_an_engine_that_cannot_run_is_told_from_metadata(
    machine: Any, versions: dict[str, str], device: str, said: str
) -> None:
    machine(versions, ["torch==2.11.0"])
    with pytest.raises(UserError, match=f"(?s){said}"):
        SGLANG.find(device)


def test_an_engine_that_fits(machine: Any) -> None:
    machine({"sglang": "0.5.23", "torch": "2.13.0+cpu"}, ["torch==2.14.1"])
    found = SGLANG.find("cpu")  # nothing in it is compiled for a CPU: any torch will do
    assert (str(found), found.device) == ("sglang 0.5.23", "cpu")
    arguments.check(SglangOptions(engine={"chunked_prefill_size": 32}), found)
    with pytest.raises(UserError, match=r"no argument 'chunked_prefil_size'.*'chunked_prefill_size'"):
        arguments.check(SglangOptions(engine={"chunked_prefil_size": 32}), found)
    (found.folder / "srt" / "server_args.py").write_text("class ServerArgs:\n    pass\n", "utf-8")
    groups = found.folder / "srt" / "arg_groups" / "fields"
    groups.mkdir(parents=True)
    (groups / "schedule.py").write_text("class Schedule:\n    chunked_prefill_size: int = 0\n", "utf-8")
    (groups / "model.py").write_text("class Model:\n    model_path: str\n", "utf-8")
    assert arguments.names(found) == {"chunked_prefill_size", "model_path"}, "assembled from groups"
    with pytest.raises(UserError, match=r"(?s)model_path is decided by the stage's model.*remove"):
        arguments.check(SglangOptions(engine={"model_path": "x"}), found)


def test_versions_that_take_weights_in_a_session() -> None:
    wanted = {"0.5.17": "v0_5_17", "0.5.20": "v0_5_17", "0.5.21": "v0_5_21", "0.5.23": "v0_5_21"}
    assert {text: adapters.name_for(Version(text)) for text in wanted} == wanted


class Sessions:
    """Notes what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin_weight_update(self) -> tuple[bool, str]:
        self.calls.append("begin")
        return True, "Success"

    def end_weight_update(self) -> tuple[bool, str]:
        self.calls.append("end")
        return True, "Success"


def test_a_session_ends_whatever_happens_in_it() -> None:
    engine = Sessions()
    with adapters.updating(engine, "v0_5_17"):
        pass
    assert engine.calls == []
    with pytest.raises(ZeroDivisionError), adapters.updating(engine, "v0_5_21"):
        engine.calls.append(str(1 // 0))
    assert engine.calls == ["begin", "end"]
    with pytest.raises(RuntimeError, match="SGLang refused: no"):
        adapters.accepted((False, "no"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"proces": "child"}, "proces"),
        ({"bucket_mb": 0}, "greater than 0"),
        ({"cache_mb": -1}, "greater than 0"),
        ({"dtype": "fp8"}, "float32"),
        ({"logprobs": "sometimes"}, "auto"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        SglangOptions(**options)


def test_arguments_on_a_cpu_and_on_a_gpu() -> None:
    given = {"model": Path("m"), "tokenizer": None, "token_bytes": 1 << 20}
    cpu = arguments.engine_arguments(SglangOptions(engine={"chunked_prefill_size": 32}), context(), **given)
    assert (cpu["attention_backend"], cpu["disable_cuda_graph"], cpu["device"]) == (
        "torch_native",
        True,
        "cpu",
    )
    assert (cpu["chunked_prefill_size"], cpu["skip_tokenizer_init"]) == (32, True)
    assert cpu["max_total_tokens"] == 2048, "64 sequences need more than it is ever given"
    assert cpu["context_length"] > 128
    few = context(resources=Resources(max_sequences=1), max_length=8)
    assert arguments.engine_arguments(SglangOptions(), few, **given)["max_total_tokens"] == 64
    tight = arguments.engine_arguments(SglangOptions(cache_mb=1), context(), **given)
    assert tight["max_total_tokens"] == 160, "one sequence must fit"
    gpu = arguments.engine_arguments(SglangOptions(), context("cuda:0"), **given, free_share=0.95)
    assert gpu["mem_fraction_static"] == pytest.approx(0.9 / 0.95)
    assert (gpu["enable_memory_saver"], gpu["disable_cuda_graph"]) == (True, False)
    assert not {"max_total_tokens", "attention_backend"} & gpu.keys()
    half = context("cuda:0", resources=Resources(memory_share=0.3), live_model=object())  # type: ignore[arg-type]
    assert arguments.memory_share(half) == 0.3


@pytest.mark.parametrize(
    ("kind", "text", "kind_of_error", "said"),
    [
        (
            "RuntimeError",
            "Not enough memory. Please try to increase --mem-fraction-static.",
            UserError,
            "raise",
        ),
        ("RuntimeError", "CUDA out of memory. Tried", RunError, r"(?s)not enough memory, at start.*LEDGER"),
        (
            "ValueError",
            "Model architectures ['X'] are not supported for now",
            UserError,
            "does not know this",
        ),
        ("NotImplementedError", "sgl_kernel.x: this SGLang has no kernels for a CPU", UserError, "on a GPU"),
        ("ImportError", "libcudart.so.13: cannot open shared object", UserError, "torch, CUDA or driver"),
        ("KeyError", "'something new'", RunError, "failed at start: KeyError"),
    ],
)
def test_what_sglang_says_is_explained(
    kind: str, text: str, kind_of_error: type[PosttuneError], said: str
) -> None:
    with pytest.raises(kind_of_error, match=said):
        raise EXPLAINER.explain(Told(kind, text), "start", "LEDGER")


def test_sampling_leaves_nothing_to_the_models_own_settings() -> None:
    asked = Sampling(n=3, temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=7, eos_ids=frozenset({9, 2}))
    found = parameters(asked, True)
    assert (found["samples"], found["logprobs"]) == (3, True)
    assert found["fields"]["stop_token_ids"] == [2, 9]
    assert not found["fields"]["ignore_eos"], "true would ignore the stop tokens too"
    assert found["fields"]["repetition_penalty"] == 1.0
    assert parameters(Sampling(), False)["fields"]["top_k"] == -1


def test_the_folder_that_is_served_names_its_architecture_and_no_end(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"eos_token_id": 2, "hidden_size": 8, "text_config": {"eos_token_id": [2, 3], "layers": 1}}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    for name in ("generation_config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}", "utf-8")
    served = served_folder(folder, tmp_path / "served", ["LlamaForCausalLM"])
    told = json.loads((served / "config.json").read_text("utf-8"))
    expected = {"eos_token_id": None, "hidden_size": 8, "text_config": {"eos_token_id": None, "layers": 1}}
    assert told == expected | {"architectures": ["LlamaForCausalLM"]}
    assert sorted(path.name for path in served.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((folder / "config.json").read_text("utf-8")) == config, "the user's folder is as before"


def test_a_model_that_nobody_can_name_is_refused_before_the_start() -> None:
    unnamed = Facts((), layers=1, heads=1, kv_heads=1, head_dim=32, positions=128, tied=False)
    with pytest.raises(UserError, match=r"(?s)names no architecture.*write architectures into config\.json"):
        check(SglangOptions(), context(), unnamed)
    check(SglangOptions(), context(), replace(unnamed, architectures=("LlamaForCausalLM",)))


def test_the_environment_of_an_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    found = environment.of_engine("cpu", 1, tmp_path)
    assert (found["SGLANG_USE_CPU_ENGINE"], found["TMPDIR"]) == ("1", str(tmp_path))
    stand_in, _, rest = found["PYTHONPATH"].partition(":")
    assert rest == "/somewhere"
    assert (Path(stand_in) / "sgl_kernel" / "__init__.py").is_file()
    gpu = environment.of_engine("cuda:0", 1, tmp_path)
    assert gpu["PYTHONPATH"] == "/somewhere"
    assert "SGLANG_USE_CPU_ENGINE" not in gpu


def test_the_stand_in_for_kernels_says_what_is_missing() -> None:
    code = "import sgl_kernel; print(sgl_kernel.rmsnorm.__name__); sgl_kernel.rmsnorm(1)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(environment.CPU_MODULES)},
    )
    assert done.stdout.strip() == "rmsnorm"
    assert "sgl_kernel.rmsnorm: this SGLang has no kernels for a CPU" in done.stderr


def test_names_of_torchvision_stand_in_while_they_are_taken() -> None:
    with shim._standing_in():
        from torchvision.transforms import InterpolationMode  # type: ignore[import-not-found]
        from torchvision.transforms.functional import InterpolationMode as again

        assert InterpolationMode is again
    assert not [name for name in sys.modules if name.partition(".")[0] == "torchvision"]


def test_a_model_type_that_transformers_has_may_come_again_meanwhile() -> None:
    from transformers import AutoConfig, LlamaConfig

    for _ in range(2):
        with pytest.raises(ValueError, match="already used"):
            AutoConfig.register("llama", LlamaConfig)
        with shim._registering_again():
            AutoConfig.register("llama", LlamaConfig)


WATCHED = """
import multiprocessing, os, signal, sys, time
from posttune_sglang.watch import Watch

def main():
    one, two = (multiprocessing.Process(target=time.sleep, args=(5,)) for _ in range(2))
    one.start(); two.start()
    watch = Watch()
    if sys.argv[1] == "expected":
        watch.end()
    os.kill(two.pid, signal.SIGKILL)
    time.sleep(2)
    one.kill()
    print("went on")

if __name__ == "__main__":
    main()
"""


def test_an_engine_without_one_of_its_processes_ends(tmp_path: Path) -> None:
    (tmp_path / "watched.py").write_text(WATCHED, "utf-8")

    def run(how: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(tmp_path / "watched.py"), how]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    died = run("sudden")
    assert (died.returncode, died.stdout) == (4, "")
    assert "of the engine died: -9" in died.stderr
    assert run("expected").stdout == "went on\n"


def test_a_backend_that_was_not_started() -> None:
    backend = SglangBackend(SglangOptions())
    assert backend.rollout_backend_stop()
    with pytest.raises(UserError, match="not running"):
        backend.rollout_backend_checksums()


def test_nothing_heavy_is_imported_to_list_or_configure() -> None:
    code = (
        "import sys; from posttune.pipeline import options_model; from posttune.describe import describe;"
        "options_model('rollout_backend', 'sglang'); describe('rollout_backend', 'sglang');"
        "print([m for m in ('sglang', 'torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
