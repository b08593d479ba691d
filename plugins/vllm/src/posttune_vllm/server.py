"""A vLLM server that the user launched: OpenAI's completions, and vLLM's own routes for weights."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from packaging.version import InvalidVersion, Version
from posttune.engines.answers import Answer
from posttune.engines.backend import Prepared
from posttune.engines.facts import Facts, read_facts
from posttune.engines.link import Part
from posttune.engines.requests import seed_of
from posttune.engines.weights import needed
from posttune.errors import RunError, UserError
from posttune.types import Request, RolloutContext, Sampling

from posttune_vllm import adapters
from posttune_vllm import sampling as wanted
from posttune_vllm._requests import Requests
from posttune_vllm.installed import VLLM, WHO
from posttune_vllm.options import MEGABYTE, VllmOptions

if TYPE_CHECKING:
    import torch

HERE = ("localhost", "127.0.0.1", "::1")
AT_A_TIME = 64  # requests that are open, where nothing is said
LAUNCH = (
    "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model FOLDER {arguments}, "
    "with posttune-vllm installed there"
)


class Server:
    """The link to a server. Whatever passes by itself is tried again; seeds make a repeat the same."""

    def __init__(self, options: VllmOptions, context: RolloutContext, scratch: Path) -> None:
        self._options, self._context, self._scratch = options, context, scratch
        self._requests = Requests(options)
        self._model = ""
        self._version = ""
        self._hello: dict[str, Any] = {}

    def start(self) -> dict[str, Any]:
        """See that it is there, of a version we know, launched as we need it."""
        self._version = self._adapter()
        self._model = str(self._requests.get("/v1/models")["data"][0]["id"])
        fix = LAUNCH.format(arguments=adapters.adapter(self._version).server_arguments())
        try:
            self._hello = json.loads(self._call("posttune_hello", own=False)[0])
        except RunError as error:
            what = f"{self._options.server} takes no weights from posttune ({error.what})"
            raise UserError(what, who=WHO, fix=f"launch it with {fix}") from error
        if self._hello["max_model_len"] < self._context.max_length:
            what = (
                f"prompt and answer may take {self._context.max_length} tokens, and "
                f"{self._options.server} was launched for {self._hello['max_model_len']}"
            )
            fix = f"launch it with --max-model-len {self._context.max_length}, or lower max_new_tokens"
            raise UserError(what, who=WHO, fix=fix)
        if self._hello["logprobs_mode"] != "processed_logprobs" and self._options.logprobs != "never":
            what = (
                f"{self._options.server} tells log-probabilities of another distribution than it samples from"
            )
            raise UserError(what, who=WHO, fix=f"launch it with {fix}")
        return self._hello

    def generate(self, requests: Sequence[Request], sampling: Sampling, *, logprobs: bool) -> list[Answer]:
        """``n`` answers to each request, in order, many requests at a time."""
        common = wanted.parameters(sampling, logprobs) | {
            "model": self._model,
            "return_token_ids": True,
            "stream": False,
        }
        workers = self._context.resources.max_sequences or AT_A_TIME
        pool = ThreadPoolExecutor(min(workers, len(requests)))
        try:
            tasks = [pool.submit(self._answers, request, common) for request in requests]
            return [answer for task in tasks for answer in task.result()]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # of a failure the others are not waited for

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """By CUDA handles where the server shares this GPU, else as files of a shared folder."""
        from posttune.engines.buckets import buckets

        limit = self._options.bucket_mb * MEGABYTE
        pairs = iter(tensors)
        first = next(pairs, None)
        whole = chain([first] if first is not None else [], pairs)
        if first is not None and first[1].is_cuda and self._by_handle():
            for bucket in buckets(whole, limit, self._scratch):
                try:
                    self._call("posttune_load_bucket", json.dumps(bucket.describe()))
                finally:
                    bucket.free()
        else:
            self._load_folder(whole, limit)
        self._drop_caches()

    def load_adapter(self, folder: Path) -> None:
        """Servers take merged weights only."""
        raise RunError(f"a server takes no adapters ({folder})", who=WHO, fix="hand over the merged weights")

    def checksums(self) -> dict[str, str]:
        """Read back from the engine; nothing where several workers share each tensor."""
        found = self._call("posttune_checksums")
        sums: dict[str, str] = json.loads(found[0]) if len(found) == 1 else {}
        return sums

    def sleep(self) -> None:
        """A server keeps its memory."""

    def wake(self, part: Part) -> None:
        """A server keeps its memory."""

    def stop(self) -> None:
        """The server goes on; our connections end."""
        self._requests.close()

    def _adapter(self) -> str:
        text = str(self._requests.get("/version")["version"])
        try:
            version = Version(text)
        except InvalidVersion:
            version = Version("0")
        if not VLLM.knows(version):
            what = f"{self._options.server} is vLLM {text}; versions {VLLM.range} are supported"
            raise UserError(what, who=WHO, fix="launch a server of a supported version")
        return adapters.name_for(version)

    def _answers(self, request: Request, common: dict[str, Any]) -> Iterator[Answer]:
        body = {**common, "prompt": list(request.prompt_ids), "seed": seed_of(request)}
        found = self._requests.post("/v1/completions", body)
        return map(_answer, sorted(found["choices"], key=lambda choice: int(choice["index"])))

    def _by_handle(self) -> bool:
        here = urlsplit(self._options.server or "").hostname in HERE
        return bool(here and self._hello["gpu"] and not self._hello["repacked"])

    def _load_folder(self, tensors: Iterable[tuple[str, torch.Tensor]], limit: int) -> None:
        from posttune.engines.buckets import buckets

        folder = Path(tempfile.mkdtemp(prefix="weights-", dir=self._scratch))
        folder.chmod(0o755)
        try:
            for bucket in buckets(((name, tensor.cpu()) for name, tensor in tensors), limit, folder):
                Path(str(bucket.file)).chmod(0o644)  # the server may be another user's
            self._call("posttune_load_folder", str(folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _drop_caches(self) -> None:
        if not self._requests.post("/reset_prefix_cache", None).get("success", True):
            fix = "let nobody else use it while it serves a run"
            raise RunError(
                "the server could not drop its prefix cache: it is answering others", who=WHO, fix=fix
            )

    def _call(self, method: str, *arguments: str, own: bool = True) -> list[Any]:
        """A method of our extension in every worker; ``own``: it wants the adapter's name."""
        body = {"method": method, "args": [*arguments, *([self._version] if own else [])]}
        found: list[Any] = self._requests.post("/collective_rpc", body)["results"]
        return found


def prepare_server(options: VllmOptions, context: RolloutContext, scratch: Path) -> Prepared:
    """A server in place of an engine. Its model is compared with the trainer's folder, where there is one."""
    if options.shared_folder is not None and not os.access(options.shared_folder, os.W_OK):
        what = f"{options.shared_folder} cannot be written"
        raise UserError(
            what, who="rollout.options.shared_folder", fix="name a folder that both machines mount"
        )
    scratch.chmod(0o755)
    folder = context.model_path
    known = folder is not None and (folder / "config.json").is_file()
    facts = read_facts(folder, WHO) if folder is not None and known else Facts((), 0, 1, 1, 1, None, False)
    return Prepared(
        name="vllm",
        link=Server(options, context, scratch),
        facts=facts,
        needed=needed(facts, context.live_model),
        max_length=context.max_length,
        has_tokenizer=True,
        tokenizer=context.tokenizer,
        dtype=context.dtype,
        scratch=scratch,
        lora=False,
        sleeps=False,
        logprobs="none" if options.logprobs == "never" else "processed",
        server=True,
        details={"engine": f"server {options.server}"},
    )


def _answer(choice: dict[str, Any]) -> Answer:
    told = choice.get("logprobs")
    values = None if told is None else [float(value) for value in told["token_logprobs"]]
    return Answer(choice["token_ids"], values, str(choice.get("finish_reason") or "abort")[0])
