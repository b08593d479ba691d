"""Everything before an engine starts: checks, its arguments, and the folder that it reads."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttune.engines import preflight
from posttune.engines.backend import Prepared
from posttune.engines.facts import SIZES, Facts, read_facts
from posttune.engines.folder import folder_for, save_tokenizer
from posttune.engines.link import Plan
from posttune.engines.process import Process
from posttune.engines.weights import needed
from posttune.errors import UserError
from posttune.types import RolloutContext

from posttune_sglang import adapters, arguments
from posttune_sglang.environment import of_engine
from posttune_sglang.installed import SGLANG, WHO
from posttune_sglang.options import SglangOptions
from posttune_sglang.problems import EXPLAINER
from posttune_sglang.sampling import parameters

log = logging.getLogger(__name__)
_ENDS = ("eos_token_id", "eos_token")


def prepare(options: SglangOptions, context: RolloutContext, scratch: Path) -> Prepared:
    """Raises UserError for what can be known to fail."""
    engine = SGLANG.find(context.device)
    arguments.check(options, engine)
    folder = folder_for(context.model_path, context.live_model, scratch, WHO)
    facts, dtype = read_facts(folder, WHO), options.dtype or context.dtype
    check(options, context, facts)
    gpus = context.resources.tensor_parallel_size
    plan = Plan(
        explainer=EXPLAINER,
        arguments=arguments.engine_arguments(
            options,
            context,
            model=served_folder(folder.resolve(), scratch / "served", facts.architectures),
            tokenizer=_tokenizer(context.tokenizer, scratch),
            token_bytes=facts.token_bytes(dtype),
            free_share=_free_share(context.device),
        ),
        version=adapters.name_for(engine.version),
        device=context.device,
        bucket=options.bucket_mb * arguments.MEGABYTE,
        scratch=scratch,
        start_timeout=options.start_timeout_s,
        parameters=parameters,
        module="posttune_sglang.child",
        environment=of_engine(context.device, gpus, scratch),
        share=arguments.memory_share(context) if context.device.startswith("cuda") else 0.0,
        weights=facts.parameters * SIZES.get(dtype, 4),
    )
    return Prepared(
        name="sglang",
        link=Process(plan),
        facts=facts,
        needed=needed(facts, context.live_model),
        max_length=context.max_length,
        has_tokenizer=context.tokenizer is not None,
        tokenizer=context.tokenizer,
        dtype=dtype,
        scratch=scratch,
        lora=False,
        sleeps=plan.cuda and options.sleep,
        logprobs="none" if options.logprobs == "never" else "processed",
        server=False,
        details={"engine": str(engine), "process": "child"},
    )


def check(options: SglangOptions, context: RolloutContext, facts: Facts) -> None:
    """The model, the run and the machine against each other."""
    dtype, size = options.dtype or context.dtype, context.resources.tensor_parallel_size
    if not facts.architectures:
        what = "the model's config.json names no architecture, and transformers knows none of its model_type"
        raise UserError(what, who=WHO, fix="write architectures into config.json, or use rollout.name hf")
    preflight.check_dtype(dtype, "SGLang", WHO)
    preflight.check_length(facts, context.max_length, WHO)
    machine = preflight.machine(context.device)
    preflight.check_split(facts, size, context.device, machine)
    if not context.device.startswith("cuda"):
        if context.resources.memory_share is not None:
            log.warning("rollout 'sglang' runs on no GPU: memory_share is not used; see options.cache_mb")
        return
    share, resident = arguments.memory_share(context), preflight.resident(context.live_model)
    preflight.check_memory(facts, share, dtype, machine, size, resident, sleeps=options.sleep)


def served_folder(folder: Path, served: Path, architectures: Sequence[str]) -> Path:
    """A folder of links to ``folder`` whose configuration names its architecture, and no end token.

    SGLang ends an answer at those of the model's configuration too, and a request cannot say otherwise
    without losing its own. Without an architecture it does not start.
    """
    served.mkdir()
    for path in folder.iterdir():
        if path.name == "config.json":
            config = _no_ends(json.loads(path.read_text(encoding="utf-8")))
            _write(served / path.name, config | {"architectures": list(architectures)})
        elif path.name != "generation_config.json" and "tokenizer" not in path.name:
            (served / path.name).symlink_to(path)
    return served


def _tokenizer(tokenizer: Any, scratch: Path) -> Path | None:
    """The run's tokenizer for stop strings, with no end token of its own."""
    folder = save_tokenizer(tokenizer, scratch)
    path = folder / "tokenizer_config.json" if folder is not None else None
    if path is not None and path.is_file():
        _write(path, _no_ends(json.loads(path.read_text(encoding="utf-8"))))
    return folder


def _no_ends(config: Any) -> Any:
    """Without ends, in nested configurations too."""
    if not isinstance(config, dict):
        return config
    return {key: None if key in _ENDS else _no_ends(value) for key, value in config.items()}


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def _free_share(device: str) -> float:
    """The part of a GPU's memory that is free, or can be: this process's own cache counts."""
    import torch

    if not device.startswith("cuda"):
        return 1.0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return free / total
