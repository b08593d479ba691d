"""An engine through posttune and bare, on the same requests; weight hand-over, sleep and log-probabilities.

    python benchmarks/rollout.py --backend hf --model /tmp/smollm2
    python benchmarks/rollout.py --backend vllm --shape qwen2.5-7b --device cuda --dtype bfloat16 --share 0.45

``--shape`` takes a model of benchmarks/random_model.py: only its configuration is written, the trainer's
random weights are handed over, and an engine of its own begins with dummy ones. The bare engine runs in a
process of its own, before posttune's, with the same arguments: prompts as token ids, ``n`` samples each,
log-probabilities of the sampled tokens, no end token. It is given no seeds; through posttune every sample
has one. Tokens/s are those of the fastest of ``--repeat`` calls after one that is not counted. On a busy
CPU compare the tokens per second of processor time instead.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from posttune.config.models import PluginRef
from posttune.facade import RolloutEngine, build_rollout
from posttune.models.params import named_hf_tensors
from posttune.types import Completion, Request, Resources, RolloutContext, Sampling
from random_model import SHAPES
from transformers import AutoConfig, AutoModelForCausalLM

GIB = 1 << 30
SCORED = 8  # answers whose log-probabilities are compared with the trainer's
LOADS = 4


def prompts(options: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    """The same for every engine."""
    chance = random.Random(0)
    length = range(options.prompt_tokens)
    return [[chance.randrange(10, vocabulary) for _ in length] for _ in range(options.prompts)]


def model_folder(options: argparse.Namespace, scratch: Path) -> Path:
    """The folder that was named, or one with nothing but a configuration."""
    if options.model is not None:
        return Path(options.model)
    fields = dict(SHAPES[options.shape])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    config.dtype = options.dtype
    config.save_pretrained(scratch / "model")
    return scratch / "model"


def trainers_model(options: argparse.Namespace, folder: Path) -> Any:
    """The module that a trainer would have, without gradients."""
    dtype = getattr(torch, options.dtype)
    if options.model is not None:
        return (
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(options.device).requires_grad_(False)
        )
    torch.manual_seed(0)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    return model.requires_grad_(False)


@contextmanager
def timed(into: dict[str, Any], name: str) -> Iterator[None]:
    """Seconds of a block, the accelerator's work in it included."""
    began = time.perf_counter()
    yield
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    into[name] = round(time.perf_counter() - began, 4)


def used_gib(device: str) -> float:
    """Of the accelerator by all processes, or resident of this process and its children."""
    if device.startswith("cuda"):
        free, total = torch.cuda.mem_get_info(device)
        return round((total - free) / GIB, 2)
    here = psutil.Process()
    resident: int = sum(each.memory_info().rss for each in [here, *here.children(recursive=True)])
    return round(resident / GIB, 2)


def cpu_seconds() -> float:
    """Of this process and its children, so far: what a busy machine does not distort."""
    here = psutil.Process()
    times = [each.cpu_times() for each in [here, *here.children(recursive=True)]]
    return float(sum(each.user + each.system for each in times))


def fastest(options: argparse.Namespace, call: Callable[[], int]) -> dict[str, float]:
    """Tokens/s of the calls after the first one."""
    call()
    speeds, counts, before = [], [], cpu_seconds()
    for _ in range(options.repeat):
        began = time.perf_counter()
        counts.append(call())
        speeds.append(counts[-1] / (time.perf_counter() - began))
    found = {"tokens_per_s": round(max(speeds), 1), "median": round(statistics.median(speeds), 1)}
    return found | {"tokens_per_cpu_s": round(sum(counts) / max(cpu_seconds() - before, 1e-9), 1)}


# --- bare ------------------------------------------------------------------------------------


def bare_vllm(options: argparse.Namespace, folder: Path) -> tuple[Callable[[list[list[int]]], int], float]:
    """vLLM as its own documentation calls it."""
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    arguments: dict[str, Any] = {"gpu_memory_utilization": options.share}
    if options.device == "cpu":
        arguments = {"kv_cache_memory_bytes": 1 << 30}
    if options.model is None:
        arguments["load_format"] = "dummy"
    eager = options.options.get("enforce_eager", options.device == "cpu")
    sequences = options.prompts * options.n
    engine = LLM(
        str(folder), dtype=options.dtype, max_model_len=longest(options), skip_tokenizer_init=True, seed=0,
        max_num_seqs=sequences, enforce_eager=eager, **arguments, **options.options.get("engine", {}),
    )  # fmt: skip
    wanted = SamplingParams(
        n=options.n,
        temperature=1.0,
        max_tokens=options.new_tokens,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
    )

    def call(asked: list[list[int]]) -> int:
        given: Any = [{"prompt_token_ids": prompt} for prompt in asked]
        found = engine.generate(given, wanted, use_tqdm=False)
        return sum(len(answer.token_ids) for result in found for answer in result.outputs)

    return call, time.perf_counter() - began


def bare_sglang(options: argparse.Namespace, folder: Path) -> tuple[Callable[[list[list[int]]], int], float]:
    """SGLang as its own documentation calls it."""
    import sglang

    began = time.perf_counter()
    arguments: dict[str, Any] = {"load_format": "dummy"} if options.model is None else {}
    arguments["disable_cuda_graph"] = options.options.get("enforce_eager", options.device == "cpu")
    if options.device == "cpu":
        arguments |= {"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch"}
    engine = sglang.Engine(
        model_path=str(folder), dtype=options.dtype, context_length=longest(options), random_seed=0,
        skip_tokenizer_init=True, mem_fraction_static=options.share, log_level="error",
        max_running_requests=options.prompts * options.n, **arguments, **options.options.get("engine", {}),
    )  # fmt: skip
    wanted = {"n": options.n, "temperature": 1.0, "max_new_tokens": options.new_tokens, "ignore_eos": True}

    def call(asked: list[list[int]]) -> int:
        found = engine.generate(input_ids=asked, sampling_params=wanted, return_logprob=True)
        return sum(len(each["output_ids"]) for each in found)

    return call, time.perf_counter() - began


def bare_hf(options: argparse.Namespace, folder: Path) -> tuple[Callable[[list[list[int]]], int], float]:
    """``generate`` of transformers, all samples in one batch."""
    began = time.perf_counter()
    model = trainers_model(options, folder)

    def call(asked: list[list[int]]) -> int:
        ids = torch.tensor(asked, device=options.device)
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, pad_token_id=0,
            eos_token_id=None, num_return_sequences=options.n, max_new_tokens=options.new_tokens,
            min_new_tokens=options.new_tokens,
        )  # fmt: skip
        return int(found[:, ids.shape[1] :].numel())

    return call, time.perf_counter() - began


BARE = {"hf": bare_hf, "vllm": bare_vllm, "sglang": bare_sglang}


def run_bare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measured in this process, which does nothing else."""
    call, start = BARE[options.backend](options, folder)
    asked = prompts(options, vocabulary_of(folder))
    return {"start_s": round(start, 1), **fastest(options, lambda: call(asked))}


def bare_elsewhere(device: str, folder: Path, scratch: Path) -> dict[str, Any]:
    """The same script with --bare, in a process of its own."""
    result = scratch / "bare.json"
    settings = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1"}
    if device == "cpu":
        settings |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, __file__, *sys.argv[1:], "--bare", str(folder), "--json", str(result)]
    done = subprocess.run(command, check=False, stdout=sys.stderr, env={**os.environ, **settings})
    if done.returncode or not result.exists():
        raise SystemExit(f"the bare engine failed with status {done.returncode}")
    found: dict[str, Any] = json.loads(result.read_text("utf-8"))
    return found


# --- through posttune ------------------------------------------------------------------------


def longest(options: argparse.Namespace) -> int:
    """Tokens of a prompt and its answer."""
    return int(options.prompt_tokens + options.new_tokens)


def vocabulary_of(folder: Path) -> int:
    """Token ids that a prompt may hold."""
    return int(AutoConfig.from_pretrained(folder).vocab_size)


def context_of(options: argparse.Namespace, folder: Path, model: Any) -> RolloutContext:
    """What a trainer would tell the engine."""
    share = options.share if options.device.startswith("cuda") else None
    return RolloutContext(
        model_path=folder,
        tokenizer=None,
        dtype=options.dtype,
        device=options.device,
        seed=0,
        max_length=longest(options),
        resources=Resources(share, 1, options.prompts * options.n),
        live_model=model,
    )


def plugin(options: argparse.Namespace) -> PluginRef:
    """The backend, with dummy weights to begin with where there are no others."""
    given = dict(options.options)
    if options.model is None and options.backend != "hf":
        given["engine"] = {"load_format": "dummy"} | given.get("engine", {})
    return PluginRef(name=options.backend, options=given)


def hand_over(engine: RolloutEngine, model: Any, found: dict[str, Any]) -> None:
    """Seconds of each load; the first may compare checksums."""
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in named_hf_tensors(model))
    seconds = []
    for version in range(1, LOADS + 1):
        took: dict[str, float] = {}
        with timed(took, "s"):
            engine.load_weights(() if engine.info.shares_weights else named_hf_tensors(model), version)
        seconds.append(took["s"])
    best = min(seconds)
    found["load_s"], found["load_gb"] = seconds, round(size / 1e9, 3)
    found["load_gb_per_s"] = round(size / 1e9 / best, 2) if best else None


def sleep_and_wake(engine: RolloutEngine, model: Any, device: str, found: dict[str, Any]) -> None:
    """Seconds, and the memory in use, of each part of a round."""
    if not engine.info.sleep:
        return
    memory = found["memory_gib"]
    with timed(found, "sleep_s"):
        engine.sleep()
    memory["asleep"] = used_gib(device)
    with timed(found, "wake_weights_s"):
        engine.wake("weights")
    with timed(found, "load_after_wake_s"):
        engine.load_weights(named_hf_tensors(model), LOADS + 1)
    memory["weights awake"] = used_gib(device)
    with timed(found, "wake_cache_s"):
        engine.wake("cache")
    memory["awake"] = used_gib(device)


def gap(model: Any, asked: list[list[int]], n: int, answers: list[Completion]) -> dict[str, float]:
    """|log p(engine) - log p(trainer)| of sampled tokens, nats."""
    found = []
    for place in range(0, min(len(answers), SCORED * n), n):
        answer, prompt = answers[place], asked[place // n]
        ids = torch.tensor([[*prompt, *answer.token_ids]], device=model.device)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()
        found.append((chosen - torch.tensor(answer.logprobs)).abs())
    gaps = torch.cat(found)
    return {"mean": round(float(gaps.mean()), 6), "max": round(float(gaps.max()), 6), "tokens": len(gaps)}


def through_posttune(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything of one engine, through the facade that the trainer uses."""
    model = trainers_model(options, folder)
    found: dict[str, Any] = {"memory_gib": {"trainer's weights": used_gib(options.device)}}
    with build_rollout(plugin(options)) as engine:
        with timed(found, "start_s"):
            engine.start(context_of(options, folder, model))
        found["engine"] = dict(engine.info.details)
        found["memory_gib"]["engine started"] = used_gib(options.device)
        hand_over(engine, model, found)
        asked = prompts(options, vocabulary_of(folder))
        wanted = [Request(f"r{place}", tuple(ids), place) for place, ids in enumerate(asked)]
        sampling = Sampling(n=options.n, max_new_tokens=options.new_tokens)
        answers: list[Completion] = []

        def call() -> int:
            answers[:] = engine.generate(wanted, sampling)
            return sum(len(answer.token_ids) for answer in answers)

        found |= fastest(options, call)
        found["memory_gib"]["after generation"] = used_gib(options.device)
        found["logprob_gap"] = gap(model, asked, options.n, answers)
        sleep_and_wake(engine, model, options.device, found)
        if engine.info.sleep:
            call()
            found["logprob_gap_after_sleep"] = gap(model, asked, options.n, answers)
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backend", default="hf", choices=sorted(BARE))
    parser.add_argument("--model", help="a Hugging Face folder")
    parser.add_argument("--shape", default="qwen2.5-7b", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--share", type=float, default=0.45, help="of the GPU's memory, for the engine")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--n", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=45)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--options", type=json.loads, default={}, help="rollout.options, as JSON")
    parser.add_argument("--skip-bare", action="store_true")
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the results there too")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The bare engine, then posttune's."""
    if options.bare is not None:
        return run_bare(options, options.bare)
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder(options, Path(scratch))
        bare = None if options.skip_bare else bare_elsewhere(options.device, folder, Path(scratch))
        ours = through_posttune(options, folder)
    found: dict[str, Any] = {"bare": bare, "posttune": ours}
    if bare is not None:
        found["share_of_bare"] = round(ours["tokens_per_s"] / bare["tokens_per_s"], 3)
    return found


def main() -> None:
    options = arguments()
    found = measure(options)
    text = json.dumps(found, indent=2)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")
    if options.bare is None:
        print(text)


if __name__ == "__main__":
    main()
