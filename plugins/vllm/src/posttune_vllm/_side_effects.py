"""An engine in the trainer's process, without its traces: generators, threads and process groups."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
import torch.distributed as dist
from posttune.errors import UserError

from posttune_vllm.installed import WHO

_failed: list[str] = []  # why an earlier start failed in this process
_live = 0  # engines in this process
_trainers_group = False  # whether torch.distributed was in use before the first of them


@contextmanager
def untouched() -> Iterator[None]:
    """The random generators of this process are as before, whatever happens inside."""
    state, numbers = random.getstate(), np.random.get_state()
    plain = torch.get_rng_state()
    gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numbers)
        torch.set_rng_state(plain)
        if gpu is not None:
            torch.cuda.set_rng_state_all(gpu)


@contextmanager
def start_inside(environment: dict[str, str]) -> Iterator[None]:
    """Around an engine's start. A start that fails leaves vLLM unusable in this process: it is noted."""
    global _live, _trainers_group
    _refuse()
    if _live == 0:
        _trainers_group = dist.is_initialized()
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    default = torch.get_default_dtype()
    os.environ.update(environment)
    try:
        with untouched():
            yield
        _live += 1
    except BaseException as error:
        _failed.append(f"{type(error).__name__}: {error}")
        raise
    finally:
        torch.set_num_threads = set_threads  # vLLM's CPU worker puts a function there that does nothing
        torch.set_num_threads(threads)
        torch.set_default_dtype(default)


@contextmanager
def eager(active: bool) -> Iterator[None]:
    """While vLLM works: nothing is compiled, and the trainer's own compilation stays as it is."""
    if not active:
        yield
        return
    import torch._dynamo

    with torch._dynamo.config.patch(disable=True):
        yield


@contextmanager
def stop_inside() -> Iterator[None]:
    """Around an engine's stop: of the process groups goes what vLLM made, with the last of its engines.

    vLLM's own stop takes down all groups of the process, the trainer's and another engine's too.
    """
    global _live
    _live -= 1
    keep = _trainers_group or _live > 0
    with untouched(), _kept() if keep else nullcontext():
        yield
    if not keep and dist.is_initialized():
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        destroy_model_parallel()
        destroy_distributed_environment()


@contextmanager
def _kept() -> Iterator[None]:
    from vllm.v1.engine import core

    own = core.__dict__.get("cleanup_dist_env_and_memory")
    if own is None:  # versions that leave the groups alone
        yield
        return
    core.__dict__["cleanup_dist_env_and_memory"] = lambda: None
    try:
        yield
    finally:
        core.__dict__["cleanup_dist_env_and_memory"] = own


def _refuse() -> None:
    fix = "set rollout.options.process: child, or begin a new process"
    if _failed:
        what = f"an earlier start of vLLM failed in this process ({_failed[-1].splitlines()[0]})"
        raise UserError(what, who=WHO, fix=fix)
    if dist.is_initialized() and dist.get_world_size() > 1:
        what = f"the trainer runs in {dist.get_world_size()} processes: an engine cannot share one with it"
        raise UserError(what, who=WHO, fix="set rollout.options.process: child")
