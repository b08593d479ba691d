"""Mixed into vLLM's worker by name (``worker_extension_cls``): takes weights, and tells what it holds.

Runs in whichever process the worker runs in, ours or a server's. Every argument and result is plain
data, so that it passes vLLM's own calls without pickle. Importing this module imports nothing heavy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from posttune_vllm.adapters import adapter

if TYPE_CHECKING:
    import torch

Tensors = Iterable[tuple[str, "torch.Tensor"]]
SOURCES: dict[str, Tensors] = {}  # handed over within one process, by key


class WorkerExtension:
    """Methods that every worker of an engine gains; each begins with ``posttune_``."""

    def posttune_hello(self) -> str:
        """The version of vLLM, as JSON with what the trainer must know of the engine."""
        import vllm

        from posttune_vllm._tensors import on_gpu, repacked

        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        config = self.vllm_config.model_config  # type: ignore[attr-defined]
        known = {"vllm": vllm.__version__, "dtype": str(config.dtype).removeprefix("torch.")}
        known |= {"max_model_len": config.max_model_len, "logprobs_mode": str(config.logprobs_mode)}
        return json.dumps(known | {"gpu": on_gpu(model), "repacked": repacked(model)})

    def posttune_load(self, key: str, version: str) -> int:
        """Take all weights from an iterator of this process; returns how many tensors came."""
        return _load(self, SOURCES.pop(key), version)

    def posttune_load_folder(self, folder: str, version: str) -> int:
        """Take all weights from the safetensors files of a folder."""
        from posttune.engines.buckets import folder_tensors

        return _load(self, folder_tensors(folder), version)

    def posttune_load_bucket(self, bucket: str, version: str) -> int:
        """Take some of the weights, from another process's GPU memory or from a file."""
        from posttune.engines.buckets import open_bucket

        from posttune_vllm._tensors import load_some

        return load_some(self, open_bucket(json.loads(bucket)), adapter(version))

    def posttune_checksums(self, version: str) -> str:
        """SHA-256 by Hugging Face name, read back from the weights in use; as JSON."""
        from posttune_vllm._tensors import checksums

        return json.dumps(checksums(adapter(version).model_of(self)))


def _load(worker: Any, tensors: Tensors, version: str) -> int:
    from posttune_vllm._tensors import load_all

    return load_all(worker, tensors, adapter(version))
