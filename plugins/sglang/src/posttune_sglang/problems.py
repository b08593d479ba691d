"""What SGLang's messages mean."""

from __future__ import annotations

from posttune.engines.problems import HF_TAKES_IT, LESS_MEMORY, Explainer, Rule

from posttune_sglang.installed import WHO

RULES = (
    Rule(
        (r"mem[-_]fraction[-_]static",),
        "the engine's share of the GPU leaves no memory for its cache",
        "raise rollout.resources.memory_share, or use a smaller model or more GPUs",
        memory=True,
    ),
    Rule(
        ("out of memory", "OutOfMemory", "DefaultCPUAllocator", "Not enough memory"),
        "not enough memory",
        LESS_MEMORY,
        user=False,
        memory=True,
    ),
    Rule(
        (
            r"[Mm]odel architectures? .*not supported", "does not recognize this architecture",
            "Unsupported architectures", "no SGLang implementation",
        ),
        "SGLang does not know this model",
        HF_TAKES_IT,
    ),
    Rule(
        (r"this SGLang has no kernels for a CPU",),
        "this needs a kernel that SGLang has for GPUs only",
        f"run it on a GPU; {HF_TAKES_IT}",
    ),
    Rule(
        (r"head_?(size|dim)\S* .*not supported", "Unsupported head"),
        "SGLang has no attention for this model here",
        f"name another in rollout.options.attention_backend; {HF_TAKES_IT}",
    ),
    Rule(
        ("context_length .* is greater", "max_position_embeddings"),
        "the sequences are longer than the model takes",
        "lower rollout.sampling.max_new_tokens or max_prompt_length",
    ),
    Rule(
        ("not divisible by", "must be divisible"),
        "the tensor-parallel size does not fit",
        "change rollout.resources.tensor_parallel_size",
    ),
    Rule(
        (
            r"lib\w+\.so", "undefined symbol", "no kernel image", "driver version is insufficient",
            r"operator \w+::\w+ does not exist", "ModuleNotFoundError", "ImportError",
        ),
        "SGLang does not run with this torch, CUDA or driver",
        "install it with a file of the plugin's folder constraints/, in an environment of its own",
    ),
)  # fmt: skip
EXPLAINER = Explainer(WHO, RULES, "rollout.options.engine.log_level: info makes it say more")
