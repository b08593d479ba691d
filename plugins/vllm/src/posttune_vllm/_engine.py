"""vLLM itself, in whichever process this runs."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from posttune.engines.answers import Answer
from posttune.engines.buckets import open_bucket
from torch import Tensor

from posttune_vllm import worker
from posttune_vllm.adapters import adapter

LORA = ("posttune", 1)  # name and number of the one adapter


class Engine:
    """An engine and its weights. Every method raises whatever vLLM raises."""

    def __init__(self, arguments: dict[str, Any], version: str) -> None:
        from vllm import LLM

        self._version, self._adapter = version, adapter(version)
        self._lora: Any = None
        self._workers = int(arguments["tensor_parallel_size"])
        self._llm = LLM(**arguments)
        self.hello: dict[str, Any] = json.loads(self._call("posttune_hello")[0])

    def generate(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], parameters: dict[str, Any]
    ) -> list[Answer]:
        """``n`` answers to each prompt, in order."""
        from vllm import SamplingParams

        flat = parameters["logprobs"] is not None
        common = {**parameters, "flat_logprobs": flat, "detokenize": bool(parameters["stop"])}
        asked = [SamplingParams(**common, seed=seed) for seed in seeds]
        tokens: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = self._llm.generate(tokens, asked, use_tqdm=False, lora_request=self._lora)
        return [_answer(each) for result in results for each in sorted(result.outputs, key=lambda o: o.index)]

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take all weights from tensors of this process."""
        worker.SOURCES["load"] = tensors
        try:
            self._call("posttune_load", "load")
        finally:
            worker.SOURCES.pop("load", None)
        self._loaded()

    def load_buckets(self, buckets: Iterator[dict[str, Any]]) -> None:
        """Take all weights from another process, as descriptions of buckets."""
        if self._workers == 1:
            self.load(pair for bucket in buckets for pair in open_bucket(bucket))
            return
        for bucket in buckets:
            self._call("posttune_load_bucket", json.dumps(bucket))
        self._loaded()

    def load_adapter(self, folder: Path) -> None:
        """Take a folder of PEFT's as the adapter of all further answers, in place of the one before."""
        from vllm.lora.request import LoRARequest

        name, number = LORA
        request = LoRARequest(name, number, str(folder), load_inplace=True)
        if not self._llm.llm_engine.add_lora(request):
            raise RuntimeError(f"vLLM did not take the adapter in {folder}")
        self._lora = LoRARequest(name, number, str(folder))
        self.drop_caches()

    def _loaded(self) -> None:
        """An adapter belonged to the weights before."""
        self._lora = None
        self.drop_caches()

    def drop_caches(self) -> None:
        """What was computed with old weights is computed anew."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be dropped: requests are still running")

    def checksums(self) -> dict[str, str]:
        """By Hugging Face name; nothing where several workers share each tensor."""
        if self._workers > 1:
            return {}
        found: dict[str, str] = json.loads(self._call("posttune_checksums")[0])
        return found

    def sleep(self) -> None:
        """Free the weights and the cache."""
        self._adapter.sleep(self._llm)

    def wake(self, part: str) -> None:
        """Take memory for "weights", then for "cache"."""
        self._adapter.wake(self._llm, part)
        if part == "cache":
            self.drop_caches()

    def stop(self) -> None:
        """Let go of everything."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        if method != "posttune_hello":
            arguments = (*arguments, self._version)
        found: list[Any] = self._llm.collective_rpc(method, args=arguments)
        return found


def _answer(output: Any) -> Answer:
    logprobs = None
    if output.logprobs is not None:
        flat = output.logprobs  # at each position the sampled token comes first
        logprobs = [flat.logprobs[start] for start in flat.start_indices]
    return Answer(output.token_ids, logprobs, (output.finish_reason or "abort")[0])
