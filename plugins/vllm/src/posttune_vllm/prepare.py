"""Everything before an engine starts: checks, its arguments, and where it will run."""

from __future__ import annotations

import logging
from pathlib import Path

from posttune.engines import preflight
from posttune.engines.backend import Prepared
from posttune.engines.facts import SIZES, Facts, read_facts
from posttune.engines.folder import folder_for, save_tokenizer
from posttune.engines.link import Link, Plan
from posttune.engines.process import Process
from posttune.engines.weights import needed
from posttune.errors import UserError
from posttune.types import RolloutContext

from posttune_vllm import adapters, arguments
from posttune_vllm.environment import of_engine
from posttune_vllm.installed import VLLM, WHO
from posttune_vllm.options import MEGABYTE, VllmOptions
from posttune_vllm.problems import EXPLAINER
from posttune_vllm.sampling import parameters

log = logging.getLogger(__name__)
CPU_HEADS = "32, 48, 64, 80, 96, 112, 128 and larger multiples of 16"


def prepare(options: VllmOptions, context: RolloutContext, scratch: Path) -> Prepared:
    """Raises UserError for what can be known to fail."""
    if options.server is not None:
        from posttune_vllm.server import prepare_server

        return prepare_server(options, context, scratch)
    engine = VLLM.find(context.device)
    arguments.check(options, engine)
    folder = folder_for(context.model_path, context.live_model, scratch, WHO)
    facts, dtype = read_facts(folder, WHO), options.dtype or context.dtype
    check(options, context, facts)
    asked = arguments.engine_arguments(
        options,
        context,
        model=folder.resolve(),
        tokenizer=save_tokenizer(context.tokenizer, scratch),
        token_bytes=facts.token_bytes(dtype),
    )
    gpus, cuda = context.resources.tensor_parallel_size, context.device.startswith("cuda")
    plan = Plan(
        explainer=EXPLAINER,
        arguments=asked,
        version=adapters.name_for(engine.version),
        device=context.device,
        bucket=options.bucket_mb * MEGABYTE,
        scratch=scratch,
        start_timeout=options.start_timeout_s,
        parameters=parameters,
        module="posttune_vllm.child",
        environment=of_engine(context.device, gpus, eager=bool(asked["enforce_eager"])),
        share=arguments.memory_share(options, context) if cuda else 0.0,
        weights=facts.parameters * SIZES.get(dtype, 4),
    )
    return Prepared(
        name="vllm",
        link=_link(options, plan),
        facts=facts,
        needed=needed(facts, context.live_model),
        max_length=context.max_length,
        has_tokenizer=context.tokenizer is not None,
        tokenizer=context.tokenizer,
        dtype=dtype,
        scratch=scratch,
        lora=options.lora_rank > 0,
        sleeps=cuda and options.sleep,
        logprobs="none" if options.logprobs == "never" else "processed",
        server=False,
        details={"engine": str(engine), "process": options.process},
    )


def check(options: VllmOptions, context: RolloutContext, facts: Facts) -> None:
    """The model, the run and the machine against each other."""
    dtype, size = options.dtype or context.dtype, context.resources.tensor_parallel_size
    preflight.check_dtype(dtype, "vLLM", WHO)
    check_model(facts, context)
    machine = preflight.machine(context.device)
    preflight.check_split(facts, size, context.device, machine)
    if not context.device.startswith("cuda"):
        if context.resources.memory_share is not None or options.gpu_memory_utilization is not None:
            log.warning("rollout 'vllm' runs on no GPU: memory_share is not used; see options.cache_mb")
        return
    share, resident = arguments.memory_share(options, context), preflight.resident(context.live_model)
    preflight.check_memory(facts, share, dtype, machine, size, resident, sleeps=options.sleep)


def check_model(facts: Facts, context: RolloutContext) -> None:
    """The model against the run, and against what vLLM has on a CPU."""
    preflight.check_length(facts, context.max_length, WHO)
    if not context.device.startswith("cuda") and (facts.head_dim < 32 or facts.head_dim % 16):
        raise UserError(
            f"vLLM has no attention on a CPU for heads of {facts.head_dim}",
            who=WHO,
            fix=f"it serves {CPU_HEADS}; rollout.name hf takes any",
        )


def _link(options: VllmOptions, plan: Plan) -> Link:
    if options.process == "inline":
        from posttune_vllm.inline import Inline

        return Inline(plan)
    return Process(plan)
