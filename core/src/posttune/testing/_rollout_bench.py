"""What the rollout suite measures an engine with: a tiny model in a trainer's hands."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import psutil
import torch
from torch import Tensor

from posttune.config.models import LoraConfig, ModelConfig
from posttune.data.packing import TokenSequence, collate, plan
from posttune.errors import PosttuneError
from posttune.facade import RolloutEngine
from posttune.models.forward import response_logprobs
from posttune.models.hf_folder import without_progress
from posttune.models.load import load_model
from posttune.models.lora import apply_lora, merge
from posttune.models.params import named_hf_tensors
from posttune.models.tokenizer import byte_tokenizer
from posttune.testing.tiny import tiny_model
from posttune.types import Completion, Request, Resources, RolloutContext, Sampling

if TYPE_CHECKING:
    from posttune.testing._rollout_base import RolloutChecks

CONTEXT = 512  # tokens, prompt and answer: several blocks of any engine's cache
SHARPNESS = 15.0  # a random model answers almost uniformly, and no check could tell its answers apart
TEXTS = ("a", "12+34=", "hello", "The quick brown fox", "x" * 40, "naïve → 日本 🎉\n")
ENDS = frozenset(range(50, 90))  # of 259 tokens: about one in seven ends an answer of a random model


def requests(texts: Sequence[str] = TEXTS, *, seed: int = 100) -> list[Request]:
    """One request a text, each with a seed of its own."""
    words = byte_tokenizer()
    return [Request(f"r{i}", tuple(words.encode(text)), seed + i) for i, text in enumerate(texts)]


def tokens(answers: Sequence[Completion]) -> list[tuple[int, ...]]:
    """The token ids alone."""
    return [answer.token_ids for answer in answers]


def write_model(folder: Path, *, tie: bool) -> None:
    """A tiny model whose answers differ clearly from token to token."""
    tiny_model(folder, tie=tie)
    model = load_model(_model_config(folder, "float32"), folder, seed=0, device="cpu").model
    with torch.no_grad(), without_progress():
        model.get_output_embeddings().weight.mul_(SHARPNESS)
        model.save_pretrained(folder)


@dataclass(frozen=True)
class Chance:
    """The state of every generator that a trainer draws from."""

    python: object
    numpy: object
    torch: bytes
    cuda: bytes

    @classmethod
    def now(cls) -> Chance:
        """Of this process, at this moment."""
        gpu = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_initialized() else b""
        state: Any = np.random.get_state()
        numpy = (state[1].tobytes(), state[2])
        return cls(random.getstate(), numpy, torch.get_rng_state().numpy().tobytes(), gpu)


class Bench:
    """A trainer's model, and an engine that answers for it. One engine at a time; stop it with ``close``."""

    def __init__(self, suite: RolloutChecks, folder: Path, *, tie: bool = False) -> None:
        if not (folder / "config.json").exists():
            write_model(folder, tie=tie)
        loaded = load_model(_model_config(folder, suite.dtype), folder, seed=0, device=suite.device)
        self.suite, self.folder, self.version = suite, folder, 0
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.original = {name: tensor.clone() for name, tensor in self.weights().items()}
        self.processes: list[psutil.Process] = []
        self.prompts: dict[str, tuple[int, ...]] = {}  # of what was asked last under each id
        self._changed = False
        self.drew: list[str] = []  # steps at which the engine touched the trainer's generators
        self._engine: RolloutEngine | None = None
        # Open as long as this: the engine's processes, and its loggers here, keep writing to it. With a
        # descriptor: vLLM on a GPU asks standard output for it.
        self._output = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115

    @property
    def engine(self) -> RolloutEngine:
        """The engine, started, with the trainer's weights."""
        if self._engine is None:
            before, mine = Chance.now(), set(_children())
            engine = self.suite.make()
            with self.listening():
                engine.start(self.context())
            self._engine = engine
            self.processes = [each for each in _children() if each not in mine and _works(each)]
            self._note("start", before)
            self.version = 0
            self.send()
        return self._engine

    def context(self) -> RolloutContext:
        """What a trainer would tell the engine."""
        suite = self.suite
        return RolloutContext(
            model_path=self.folder,
            tokenizer=self.tokenizer,
            dtype=suite.dtype,
            device=suite.device,
            seed=0,
            max_length=CONTEXT,
            resources=Resources(suite.memory_share, 1, suite.max_sequences),
            live_model=self.model if suite.live else None,
        )

    def close(self) -> None:
        """Stop the engine, if one runs."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.stop()

    def forget(self) -> None:
        """Let go of an engine that died; its stop may fail, and that is for the check to say."""
        engine, self._engine = self._engine, None
        if engine is not None:
            with contextlib.suppress(PosttuneError):
                engine.stop()

    def answer(self, asked: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Generate, and note whether the trainer's generators were touched."""
        engine, before = self.engine, Chance.now()
        self.prompts |= {request.id: request.prompt_ids for request in asked}
        with self.listening():
            answers = engine.generate(asked, sampling)
        self._note("generate", before)
        return answers

    def weights(self) -> dict[str, Tensor]:
        """The trainer's weights by Hugging Face name, not copied."""
        return dict(named_hf_tensors(self.model))

    def send(self) -> None:
        """Hand the weights over, as the trainer does after a step."""
        engine, before = self.engine, Chance.now()
        self.version += 1
        shared = engine.info.shares_weights
        with self.listening():
            engine.load_weights(() if shared else named_hf_tensors(self.model), self.version)
        self._note("load_weights", before)

    def set(self, weights: Mapping[str, Tensor], *, send: bool = True) -> None:
        """Change the trainer's model, as an optimiser would; and hand it over."""
        own = self.weights()
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)
        self._changed = True
        if send:
            self.send()

    def reset(self) -> None:
        """The weights of the beginning, if there are others now."""
        if self._changed:
            self.set(self.original)
            self._changed = False

    def other(self, seed: int) -> dict[str, Tensor]:
        """Weights of another model altogether, as sharp as this one."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: _like(tensor, torch.randn(tensor.shape, generator=generator))
            for name, tensor in self.original.items()
        }

    def script(self, chain: Sequence[int]) -> dict[str, Tensor]:
        """Weights that answer the token ``chain[i]`` with ``chain[i + 1]``, whatever came before.

        Greedy or not: every other token is e^-16 times as likely at most. No token but the last may
        stand in the chain twice; the output embedding must not be tied.
        """
        state = {name: torch.zeros_like(tensor) for name, tensor in self.original.items()}
        for name in state:
            if name.endswith("norm.weight"):
                state[name] += 1
        vectors = torch.randn(len(chain), self.original["lm_head.weight"].shape[1], generator=_generator(7))
        vectors = vectors / vectors.square().mean(-1, keepdim=True).sqrt()
        for token, follower, vector in zip(chain, chain[1:], vectors, strict=False):
            state["model.embed_tokens.weight"][token] = vector
            state["lm_head.weight"][follower] = vector / 2
        return state

    def kinds_of_tensor(self) -> list[str]:
        """One name of every kind: those outside the layers, and those of the last layer."""
        last = max(int(name.split(".")[2]) for name in self.original if ".layers." in name)
        return [name for name in self.original if ".layers." not in name or f".layers.{last}." in name]

    def logits(self, answer: Completion, model: Any = None) -> Tensor:
        """The trainer's logits at each token of an answer, float32 [T, V]."""
        prompt = self.prompts[answer.request_id]
        ids = torch.tensor([[*prompt, *answer.token_ids]], device=self.suite.device)
        with torch.no_grad():
            out = (model or self.model)(input_ids=ids, use_cache=False).logits[0].float()
        return cast(Tensor, out[len(prompt) - 1 : -1].cpu())

    def logprobs(self, answers: Sequence[Completion], temperature: float) -> list[Tensor]:
        """What the trainer computes for the same tokens: float32 [T] an answer."""
        rows = []
        for answer in answers:
            prompt = self.prompts[answer.request_id]
            rows.append(TokenSequence(prompt + answer.token_ids, len(prompt)))
        found: list[Tensor] = [torch.empty(0)] * len(rows)
        for micro in plan([len(row.ids) for row in rows], micro_batch_tokens=1024):
            batch = collate(rows, micro, self.suite.device)
            with torch.no_grad():
                logp = response_logprobs(self.model, batch, temperature=temperature).logp.cpu()
            sizes = [len(answers[place].token_ids) for place in batch.order]
            for place, part in zip(batch.order, logp.split(sizes), strict=True):
                found[place] = part
        return found

    def merged_adapters(self) -> tuple[Any, list[tuple[str, Tensor]]]:
        """A copy of the trainer's model with adapters merged; and what its trainer would hand over."""
        config = LoraConfig(rank=4, alpha=16.0)
        adapted = apply_lora(copy.deepcopy(self.model), config, seed=1)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=_generator(9)) * 0.2)
        tensors = [(name, tensor.clone()) for name, tensor in named_hf_tensors(adapted)]
        return merge(cast(Any, adapted)), tensors

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """What this process and those that it starts write to standard output goes to ``output``."""
        saved = os.dup(1)
        try:
            with contextlib.redirect_stdout(self._output):
                if sys.__stdout__ is not None:
                    sys.__stdout__.flush()
                os.dup2(self._output.fileno(), 1)
                yield
        finally:
            os.dup2(saved, 1)
            os.close(saved)

    @property
    def output(self) -> str:
        """What was written to standard output since the engine was made."""
        self._output.flush()
        return os.pread(self._output.fileno(), self._length(), 0).decode(errors="replace")

    def memory(self) -> dict[str, int]:
        """Bytes in use: by this process and the engine's, and on the accelerator."""
        processes = [psutil.Process(), *(each for each in self.processes if each.is_running())]
        found = {"host": sum(each.memory_info().rss for each in processes)}
        if torch.device(self.suite.device).type == "cuda":
            free, total = torch.cuda.mem_get_info()
            found["accelerator"] = total - free
        return found

    def _length(self) -> int:
        return os.fstat(self._output.fileno()).st_size

    def _note(self, step: str, before: Chance) -> None:
        if Chance.now() != before:
            self.drew.append(step)


def named(asked: Sequence[Request], name: str) -> list[Request]:
    """The same requests under other ids."""
    return [replace(request, id=f"{name}{place}") for place, request in enumerate(asked)]


def digest_of(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def truncated(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits after temperature, top-k and top-p, by transformers' own definition of them."""
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    scores, ids = logits / sampling.temperature, cast(torch.LongTensor, torch.empty(0, dtype=torch.int64))
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(ids, cast(torch.FloatTensor, scores))
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(ids, cast(torch.FloatTensor, scores))
    return scores


def _model_config(folder: Path, dtype: str) -> ModelConfig:
    return ModelConfig.model_validate({"path": str(folder), "dtype": dtype})


def _works(process: psutil.Process) -> bool:
    """Not Python's own helper, which lives as long as this process does."""
    with contextlib.suppress(psutil.Error):
        return not any("resource_tracker" in part for part in process.cmdline())
    return False


def _children() -> list[psutil.Process]:
    return list(psutil.Process().children(recursive=True))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _like(tensor: Tensor, noise: Tensor) -> Tensor:
    """Noise with the spread of a matrix; a norm's weights stay near 1."""
    if tensor.dim() < 2:
        return (1 + 0.1 * noise).to(tensor)
    return (noise * float(tensor.float().std())).to(tensor)
