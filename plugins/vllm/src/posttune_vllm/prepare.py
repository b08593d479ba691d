"""Everything before an engine starts: checks, its arguments, and where it will run."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from posttune.errors import UserError
from posttune.types import BackendInfo, RolloutContext

from posttune_vllm import adapters, arguments, installed, preflight
from posttune_vllm.facts import SIZES, Facts, read_facts
from posttune_vllm.installed import WHO
from posttune_vllm.link import Link, Plan
from posttune_vllm.options import MEGABYTE, VllmOptions
from posttune_vllm.weights import needed

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
SHARED_MEMORY = Path("/dev/shm")
ADAM_BYTES = 8  # of optimiser state for each trained number


@dataclass(frozen=True)
class Prepared:
    """An engine that is checked and not yet started."""

    link: Link
    facts: Facts
    needed: set[str]
    max_length: int
    has_tokenizer: bool
    dtype: str
    scratch: Path
    lora: bool
    sleeps: bool
    logprobs: Literal["none", "raw", "processed"]
    server: bool
    details: dict[str, str]

    def started(self, hello: dict[str, Any]) -> BackendInfo:
        """What core is told."""
        details = {**self.details, "version": str(hello["vllm"]), "dtype": str(hello["dtype"])}
        return BackendInfo(
            name="vllm",
            sleep=self.sleeps,
            lora=self.lora,
            logprobs=self.logprobs,
            server=self.server,
            details=details,
        )

    def write_adapter(self, tensors: Iterable[tuple[str, torch.Tensor]], like: Path) -> Path:
        """A PEFT folder with these tensors and the configuration of another."""
        from safetensors.torch import save_file

        source = like / "adapter_config.json"
        if not source.is_file():
            what = f"{like} holds no adapter_config.json, which says how the adapter is applied"
            raise UserError(what, who=WHO, fix="name the folder of a PEFT adapter")
        rank = json.loads(source.read_text(encoding="utf-8")).get("r")
        if not isinstance(rank, int):
            raise UserError(f"{source} says no rank", who=WHO, fix="save the adapter with peft again")
        folder = Path(tempfile.mkdtemp(prefix="adapter-", dir=self.scratch))
        shutil.copyfile(source, folder / source.name)
        save_file(
            {name: t.detach().cpu().contiguous() for name, t in tensors}, folder / "adapter_model.safetensors"
        )
        return folder


def scratch_root(options: VllmOptions) -> Path | None:
    """Where weights and logs lie on their way: memory where there is such a folder."""
    if options.shared_folder is not None:
        return Path(options.shared_folder)
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else None


def prepare(options: VllmOptions, context: RolloutContext, scratch: Path) -> Prepared:
    """Raises UserError for what can be known to fail."""
    if options.server is not None:
        from posttune_vllm.server import prepare_server

        return prepare_server(options, context, scratch)
    engine = installed.find(context.device)
    arguments.check_table(options.engine, arguments.names(engine), engine)
    from posttune_vllm._folder import folder_for, save_tokenizer

    folder = folder_for(context.model_path, context.live_model, scratch)
    facts, dtype = read_facts(folder), options.dtype or context.dtype
    check(options, context, facts)
    plan = Plan(
        arguments=arguments.engine_arguments(
            options,
            context,
            model=folder.resolve(),
            tokenizer=save_tokenizer(context.tokenizer, scratch),
            token_bytes=facts.token_bytes(dtype),
        ),
        version=adapters.name_for(engine.version),
        device=context.device,
        bucket=options.bucket_mb * MEGABYTE,
        scratch=scratch,
        start_timeout=options.start_timeout_s,
        share=arguments.memory_share(options, context) if context.device.startswith("cuda") else 0.0,
        weights=facts.parameters * SIZES.get(dtype, 4),
    )
    return Prepared(
        link=_link(options, plan),
        facts=facts,
        needed=needed(facts, context.live_model),
        max_length=context.max_length,
        has_tokenizer=context.tokenizer is not None,
        dtype=dtype,
        scratch=scratch,
        lora=options.lora_rank > 0,
        sleeps=plan.cuda and options.sleep,
        logprobs="none" if options.logprobs == "never" else "processed",
        server=False,
        details={"engine": str(engine), "process": options.process},
    )


def check(options: VllmOptions, context: RolloutContext, facts: Facts) -> None:
    """The model, the run and the machine against each other."""
    dtype, cuda = options.dtype or context.dtype, context.device.startswith("cuda")
    if dtype not in SIZES:
        raise UserError(f"vLLM has no weights of type {dtype}", who=WHO, fix=f"use one of {', '.join(SIZES)}")
    preflight.check_model(facts, context)
    machine = _machine(context.device)
    size = context.resources.tensor_parallel_size
    preflight.check_split(facts, size, context.device, machine)
    if not cuda:
        if context.resources.memory_share is not None or options.gpu_memory_utilization is not None:
            log.warning("rollout 'vllm' runs on no GPU: memory_share is not used; see options.cache_mb")
        return
    share, resident = arguments.memory_share(options, context), _resident(context.live_model)
    preflight.check_memory(facts, share, dtype, machine, size, resident, sleeps=options.sleep)


def _link(options: VllmOptions, plan: Plan) -> Link:
    if options.process == "inline":
        from posttune_vllm.inline import Inline

        return Inline(plan)
    from posttune_vllm.child import Child

    return Child(plan)


def _machine(device: str) -> preflight.Machine:
    import torch

    if not device.startswith("cuda") or not torch.cuda.is_available():
        return preflight.Machine(torch.cuda.device_count())
    return preflight.Machine(torch.cuda.device_count(), torch.cuda.get_device_properties(device).total_memory)


def _resident(live: Any) -> int:
    """Bytes that the trainer keeps on the GPU: weights, and Adam's state of those that it trains."""
    if live is None:
        return 0
    found = 0
    for parameter in live.parameters():
        if parameter.is_cuda:
            trained = ADAM_BYTES if parameter.requires_grad else 0
            found += parameter.numel() * (parameter.element_size() + trained)
    return found
