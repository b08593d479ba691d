"""Out of memory: the ledger, and what to change in the configuration."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from posttune.config.models import ModelConfig, RewardModelStage, RlStage, SftStage
from posttune.errors import RunError
from posttune.memory.ledger import LEDGER, Ledger

Trained = SftStage | RewardModelStage | RlStage
COUNT = 3
_OF_THE_CPU = ("DefaultCPUAllocator", "can't allocate memory", "Cannot allocate memory", "not enough memory")
log = logging.getLogger("posttune.memory")


@contextmanager
def explained(name: str, stage: object, device: torch.device) -> Iterator[None]:
    """Turn running out of memory in the block into a `RunError` with the ledger and what to change."""
    LEDGER.restart(device)
    try:
        yield
    except (RuntimeError, MemoryError, RunError) as error:
        found = cause(error)
        if found is None or not isinstance(stage, Trained):
            raise
        raise RunError(
            f"out of memory{_where(LEDGER)}: {_first_line(found)}\n{LEDGER.table()}",
            who=f"stage {name!r}",
            fix="change the configuration, one of\n    " + "\n    ".join(changes(name, stage, LEDGER.failed)),
        ) from error


def cause(error: BaseException | None) -> BaseException | None:
    """The error of an allocator that ``error`` is, or comes from."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return error
        text = str(error)
        if isinstance(error, RuntimeError) and (
            "out of memory" in text or any(t in text for t in _OF_THE_CPU)
        ):
            return error
        error = error.__cause__ or error.__context__
    return None


def _where(ledger: Ledger) -> str:
    return f" in {ledger.failed!r}" if ledger.failed else ""


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def changes(name: str, stage: Trained, phase: str) -> list[str]:
    """Three overrides that take memory off the phase that failed, the mildest first."""
    found = [*(_of_rollout(stage) if phase in ("rollout", "sync") else ()), *_of_update(stage)]
    return [f"{shlex.quote(f'{name}.{override}')}   ({why})" for override, why in found[:COUNT]]


def _of_rollout(stage: Trained) -> Iterator[tuple[str, str]]:
    if not isinstance(stage, RlStage):
        return
    resources, sampling = stage.rollout.resources, stage.rollout.sampling
    if resources.memory_share is not None:
        share = round(0.75 * resources.memory_share, 2)
        yield f"rollout.resources.memory_share={share}", f"now {resources.memory_share}: the engine's cache"
    at_a_time = resources.max_sequences or stage.batch.prompts * sampling.n
    if at_a_time > 1:
        yield f"rollout.resources.max_sequences={at_a_time // 2}", f"now {at_a_time} answers at a time"
    yield from _offloads(stage, ["policy", "critic", "reference"])
    if sampling.max_new_tokens > 1:
        yield f"rollout.sampling.max_new_tokens={sampling.max_new_tokens // 2}", "shorter answers"


def _of_update(stage: Trained) -> Iterator[tuple[str, str]]:
    model = ModelConfig(path=stage.model) if isinstance(stage.model, str) else stage.model
    where = "model" if isinstance(stage.model, ModelConfig) else None
    tokens = stage.packing.micro_batch_tokens
    if tokens > 1:
        yield f"packing.micro_batch_tokens={tokens // 2}", f"now {tokens} tokens in a forward pass"
    if where and not model.gradient_checkpointing:
        yield "model.gradient_checkpointing=true", "activations are computed again instead of kept"
    if stage.optimizer.name == "adamw":
        yield "optimizer.name=torchao_adamw_8bit", "moments of 2 bytes a weight instead of 8"
    if not stage.optimizer.offload and not model.lora:
        yield "optimizer.offload=true", "moments wait in the host's memory"
    yield from _offloads(stage, ["reference", "critic", "policy"])
    if where and model.dtype == "float32":
        yield "model.dtype=bfloat16", "weights, gradients and activations of half the size"
    if stage.memory.activations == "device":
        yield "memory.activations=host", "activations wait in the host's memory"
    if stage.memory.logits_mib > 1:
        yield f"memory.logits_mib={max(1, stage.memory.logits_mib // 4)}", "logits in smaller pieces"
    yield "packing.micro_batch_tokens=1", "one sequence in a forward pass"


def _offloads(stage: Trained, names: list[str]) -> Iterator[tuple[str, str]]:
    """What of an RL stage could still wait on the host."""
    if not isinstance(stage, RlStage):
        return
    there = {
        "policy",
        *(["critic"] if stage.critic else []),
        *(["reference"] if _has_reference(stage) else []),
    }
    more = [each for each in names if each in there and each not in stage.memory.offload]
    if more:
        value = ", ".join([*stage.memory.offload, *more])
        yield f"memory.offload=[{value}]", "models wait in the host's memory while not in use"


def _has_reference(stage: RlStage) -> bool:
    lora = isinstance(stage.model, ModelConfig) and stage.model.lora is not None
    return stage.kl.where != "none" and not lora
