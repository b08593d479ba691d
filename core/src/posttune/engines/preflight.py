"""What can be known to fail before an engine starts. Each check raises one UserError."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttune.engines.facts import SIZES, Facts
from posttune.engines.ledger import in_gib
from posttune.errors import UserError

ADAM_BYTES = 8  # of optimiser state for each trained number
OVERHEAD = 1.1  # activations and what the engine needs beside its weights


@dataclass(frozen=True)
class Machine:
    """The accelerator, as far as it matters here."""

    gpus: int
    total: int = 0  # bytes of the GPU's memory


def machine(device: str) -> Machine:
    """The one that this process runs on."""
    import torch

    if not device.startswith("cuda") or not torch.cuda.is_available():
        return Machine(torch.cuda.device_count())
    return Machine(torch.cuda.device_count(), torch.cuda.get_device_properties(device).total_memory)


def resident(live: Any) -> int:
    """Bytes that a trainer keeps on the GPU: weights, and Adam's state of those that it trains."""
    if live is None:
        return 0
    found = 0
    for parameter in live.parameters():
        if parameter.is_cuda:
            trained = ADAM_BYTES if parameter.requires_grad else 0
            found += parameter.numel() * (parameter.element_size() + trained)
    return found


def check_length(facts: Facts, longest: int, who: str) -> None:
    """The longest prompt and answer against the model."""
    if facts.positions is not None and longest > facts.positions:
        raise UserError(
            f"prompt and answer may take {longest} tokens, and the model takes {facts.positions}",
            who=who,
            fix="lower rollout.sampling.max_new_tokens or max_prompt_length",
        )


def check_dtype(dtype: str, name: str, who: str) -> None:
    """The type of the engine's weights."""
    if dtype not in SIZES:
        raise UserError(
            f"{name} has no weights of type {dtype}", who=who, fix=f"use one of {', '.join(SIZES)}"
        )


def check_split(facts: Facts, size: int, device: str, machine: Machine) -> None:
    """The tensor-parallel size against the model and the machine."""
    if size == 1:
        return
    where = "rollout.resources.tensor_parallel_size"
    if not device.startswith("cuda"):
        raise UserError(f"is {size}, and the engine runs on a CPU", who=where, fix="set it to 1")
    if size > machine.gpus:
        has = f"{machine.gpus} GPU{'s' if machine.gpus != 1 else ''}"
        raise UserError(f"is {size}, and this machine has {has}", who=where, fix=f"set it to {machine.gpus}")
    if facts.heads % size or (facts.kv_heads % size and size % facts.kv_heads):
        fits = [n for n in range(1, machine.gpus + 1) if _fits(facts, n)]
        heads = f"{facts.heads} attention heads ({facts.kv_heads} of keys and values)"
        raise UserError(
            f"{size} does not divide the model's {heads}", who=where, fix=f"set it to one of {fits}"
        )


def check_memory(
    facts: Facts, share: float, dtype: str, machine: Machine, size: int, resident: int, *, sleeps: bool
) -> None:
    """The engine's share of a GPU against its weights, and what is left against the trainer's.

    ``resident``: bytes that the trainer keeps on the GPU while the engine runs, optimiser included.
    """
    if not machine.total:
        return
    engine, weights = share * machine.total, facts.parameters * SIZES.get(dtype, 4) / size
    ledger = "\n".join(
        [
            f"    the GPU has                       {in_gib(machine.total)}",
            f"    the engine's share ({share:.2f})          {in_gib(engine)}",
            f"      its weights                     {in_gib(weights)}",
            f"    the trainer, while it generates   {in_gib(resident)}",
        ]
    )
    where = "rollout.resources.memory_share"
    if engine < OVERHEAD * weights:
        least = OVERHEAD * weights / machine.total
        fix = f"raise it above {least:.2f}" if least < 1 else "spread the engine over more GPUs"
        raise UserError(f"{share:.2f} is too little for the engine's weights\n{ledger}", who=where, fix=fix)
    if engine + resident > machine.total:
        most = (machine.total - resident) / machine.total
        fix = f"lower it below {most:.2f}" if most > 0 else "use a smaller model, LoRA, or more GPUs"
        asleep = "" if sleeps else "; rollout.options.sleep would give the rest of a step all of it"
        raise UserError(f"{share:.2f} leaves training too little\n{ledger}", who=where, fix=fix + asleep)


def _fits(facts: Facts, size: int) -> bool:
    return not (facts.heads % size or (facts.kv_heads % size and size % facts.kv_heads))
