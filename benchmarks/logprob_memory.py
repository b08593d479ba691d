"""Peak memory of a loss on log-probabilities: over whole logits, and in pieces. CPU or GPU.

    python benchmarks/logprob_memory.py                                   # full size in pieces, plain at 1/64
    python benchmarks/logprob_memory.py --device cuda --hidden 3584 --dtype bfloat16 --plain-share 1
    python benchmarks/logprob_memory.py --json out.json

Every measurement is a process of its own. On a CPU the peak is of the process's resident memory, above what
it had with the inputs made; on a GPU of torch's allocator. Where the plain loss is measured on a share of
the tokens, its peak is divided by that share: it is proportional to the tokens.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from posttune.loss.entropy import entropy as entropy_of
from posttune.models.linear_logprobs import MIB_ELEMENTS, linear_logprobs
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Case:
    """One measurement."""

    way: str  # plain or pieces
    tokens: int
    vocabulary: int
    hidden: int
    dtype: str
    device: str
    entropy: bool
    mib: int


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, entropy: bool) -> Tensor:
    """The loss over whole logits, as a trainer without pieces computes it."""
    scaled = functional.linear(hidden, weight).float() / 1.0
    loss = functional.cross_entropy(scaled, targets, reduction="none").sum()
    return loss + entropy_of(scaled).sum() if entropy else loss


def in_pieces(hidden: Tensor, weight: Tensor, targets: Tensor, entropy: bool, mib: int) -> Tensor:
    """The same loss in pieces of ``mib``."""
    logp, spread = linear_logprobs(hidden, weight, targets, entropy=entropy, piece=mib * MIB_ELEMENTS)
    loss = -logp.sum()
    return loss if spread is None else loss + spread.sum()


def measure(case: Case) -> dict[str, float]:
    """Peak MiB and seconds of the loss and its backward pass."""
    device, dtype = torch.device(case.device), getattr(torch, case.dtype)
    torch.manual_seed(0)
    hidden = torch.randn(case.tokens, case.hidden, device=device).to(dtype).requires_grad_()
    weight = torch.randn(case.vocabulary, case.hidden, device=device).mul_(0.02).to(dtype).requires_grad_()
    targets = torch.randint(case.vocabulary, (case.tokens,), device=device)
    before = _peak(device, reset=True)
    began = time.perf_counter()
    if case.way == "plain":
        loss = plain(hidden, weight, targets, case.entropy)
    else:
        loss = in_pieces(hidden, weight, targets, case.entropy, case.mib)
    loss.backward()
    value = float(loss.detach())
    seconds = time.perf_counter() - began
    return {"peak_mib": _peak(device) - before, "seconds": seconds, "loss_per_token": value / case.tokens}


def _peak(device: torch.device, reset: bool = False) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def in_a_process(case: Case) -> dict[str, float]:
    """The measurement, in a process that has done nothing else."""
    done = subprocess.run(
        [sys.executable, __file__, "--one", json.dumps(asdict(case))], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{case.way} failed: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--vocabulary", type=int, default=152_064)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mib", type=int, default=256, help="the option memory.logits_mib")
    parser.add_argument("--no-entropy", action="store_true")
    parser.add_argument(
        "--plain-share", type=float, default=1 / 64, help="share of the tokens for the plain loss"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(Case(**json.loads(options.one)))))
        return
    shared = {
        "vocabulary": options.vocabulary,
        "hidden": options.hidden,
        "dtype": options.dtype,
        "device": options.device,
        "entropy": not options.no_entropy,
        "mib": options.mib,
    }
    few = max(1, round(options.tokens * options.plain_share))
    found = {
        "plain": in_a_process(Case("plain", few, **shared)),
        "pieces": in_a_process(Case("pieces", options.tokens, **shared)),
    }
    whole = found["plain"]["peak_mib"] * options.tokens / few
    share = found["pieces"]["peak_mib"] / whole
    size = f"{options.tokens} tokens x {options.vocabulary} words, hidden {options.hidden}"
    print(f"{size}, {options.dtype}, {options.device}")
    print(f"plain, measured on {few} tokens: {found['plain']['peak_mib']:.0f} MiB; for all {whole:.0f} MiB")
    for name, result in found.items():
        loss = f"loss {result['loss_per_token']:.6f} a token"
        print(f"{name}: {result['peak_mib']:.0f} MiB, {result['seconds']:.2f} s, {loss}")
    print(f"in pieces: {100 * share:.2f} % of plain")
    if options.json:
        options.json.write_text(
            json.dumps({**found, "plain_mib_for_all": whole, "share": share}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
