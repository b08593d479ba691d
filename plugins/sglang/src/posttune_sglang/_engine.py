"""SGLang itself, in the process that it has to itself."""

from __future__ import annotations

import itertools
import json
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sglang
import torch
from posttune.engines.answers import Answer
from posttune.engines.drawing import stream_keys
from sglang.srt.entrypoints.engine import Engine as SglangEngine

from posttune_sglang import _scheduler
from posttune_sglang.adapters import accepted, updating
from posttune_sglang.arguments import LOADER
from posttune_sglang.watch import Watch

REASONS = {"stop": "s", "length": "l"}


class _Launched(SglangEngine):  # type: ignore[misc]
    run_scheduler_process_func = staticmethod(_scheduler.run)


class Engine:
    """An engine and its weights. Every method raises whatever SGLang raises."""

    def __init__(self, arguments: dict[str, Any], version: str) -> None:
        self._version = version
        self._ranks = int(arguments["tp_size"])
        self._replies = Path(tempfile.mkdtemp(prefix="replies-"))
        self._numbers = itertools.count()
        _scheduler.register()
        self._engine = _Launched(**arguments, host="127.0.0.1", port=_free_port())
        self._watch = Watch()
        self.hello: dict[str, Any] = {"sglang": sglang.__version__, "dtype": arguments["dtype"]}

    def generate(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], parameters: dict[str, Any]
    ) -> list[Answer]:
        """``samples`` answers to each prompt, in order, each a request of its own with its own seed."""
        samples, logprobs, fields = parameters["samples"], parameters["logprobs"], parameters["fields"]
        places = list(range(samples)) * len(prompts)
        keys = stream_keys([seed for seed in seeds for _ in range(samples)], places).view(np.int64)
        found = self._engine.generate(
            input_ids=[prompt for prompt in prompts for _ in range(samples)],
            sampling_params=[{**fields, "sampling_seed": int(key)} for key in keys],
            return_logprob=logprobs,
        )
        certain = fields["top_k"] == 1 and fields["temperature"] > 0  # SGLang takes it for greedy
        return [_answer(each, logprobs, certain=certain) for each in found]

    def load_buckets(self, buckets: Iterator[dict[str, Any]]) -> None:
        """Take all weights, and drop the caches with the last of them."""
        with updating(self._engine, self._version):
            for bucket in buckets:
                self._tell({"op": "load", "bucket": bucket})
        self._drop_caches()

    def load_adapter(self, folder: Path) -> None:
        """Refused before it comes to this: BackendInfo.lora is false."""
        raise RuntimeError(f"this plugin hands merged weights to SGLang, not the adapter in {folder}")

    def checksums(self) -> dict[str, str]:
        """By Hugging Face name; nothing where several GPUs share each tensor."""
        if self._ranks > 1:
            return {}
        with updating(self._engine, self._version):
            found: dict[str, str] = self._tell({"op": "checksums"})["checksums"]
        return found

    def sleep(self) -> None:
        """Free the weights and the cache."""
        self._engine.release_memory_occupation(["kv_cache", "weights"])

    def wake(self, part: str) -> None:
        """Take memory for "weights", then for "cache"."""
        self._engine.resume_memory_occupation(["weights" if part == "weights" else "kv_cache"])
        if part == "cache":
            self._drop_caches()

    def stop(self) -> None:
        """End the processes that SGLang started."""
        self._watch.end()
        self._engine.shutdown()

    def _drop_caches(self) -> None:
        """What was computed with old weights is computed anew."""
        if not self._engine.flush_cache().success:
            raise RuntimeError("the prefix cache could not be dropped: requests are still running")

    def _tell(self, message: dict[str, Any]) -> dict[str, Any]:
        """Have the loader do something in every process that holds weights; the answer of the first."""
        reply = self._replies / f"reply-{next(self._numbers)}"
        content = json.dumps({**message, "reply": str(reply)}).encode()
        tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        accepted(
            self._engine.update_weights_from_tensor(
                [("message", tensor)], load_format=LOADER, flush_cache=False
            )
        )
        outcomes = []
        for rank in range(self._ranks):
            path = Path(f"{reply}-{rank}")
            outcomes.append(json.loads(path.read_text(encoding="utf-8")))
            path.unlink()
        for outcome in outcomes:
            if "error" in outcome:
                told = outcome["error"]
                raise RuntimeError(f"{told['kind']}: {told['text']}\n{told['place']}")
        first: dict[str, Any] = outcomes[0]
        return first


def _answer(result: dict[str, Any], logprobs: bool, *, certain: bool) -> Answer:
    ids, told = result["output_ids"], result["meta_info"]
    values = [0.0 if certain else entry[0] for entry in told["output_token_logprobs"]] if logprobs else None
    reason = (told["finish_reason"] or {}).get("type", "abort")
    if reason == "abort":
        raise RuntimeError(f"SGLang aborted a request: {told['finish_reason']}")
    return Answer(ids, values, REASONS[reason])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
