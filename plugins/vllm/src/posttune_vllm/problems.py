"""What vLLM's messages mean."""

from __future__ import annotations

from posttune.engines.problems import HF_TAKES_IT, LESS_MEMORY, Explainer, Rule

from posttune_vllm.installed import WHO

MEMORY = (
    "out of memory", "OutOfMemory", "DefaultCPUAllocator", "Free memory on device", "cumem",
    "No available memory for the cache", "larger than the available KV cache memory",
    "Available memory on node",
)  # fmt: skip
UNKNOWN = (
    r"[Mm]odel architectures? .*(not supported|failed to be inspected)", "has no vLLM implementation",
    "does not recognize this architecture", "Cannot find model module",
)  # fmt: skip
HEADS = ("Unsupported CPU attention", "No common block size", r"head_?(size|dim)\S* .*not supported")
LENGTH = ("max_model_len", "maximum model length", "max_position_embeddings")
SPLIT = ("must be divisible by tensor parallel", "World size .* is larger than")
BUILD = (
    r"lib\w+\.so", "undefined symbol", "no kernel image", "driver version is insufficient", "CUDA driver",
    r"operator \w+::\w+ does not exist", "forward compatibility", "ModuleNotFoundError", "ImportError",
)  # fmt: skip
PROCESS = ("parallel group is not initialized", "default process group twice", "already initialized")
COMPILER = ("InvalidCxxCompiler", "Failed to find C compiler", r"No working C\+\+ compiler")

RULES = (
    Rule(MEMORY, "not enough memory", LESS_MEMORY, user=False, memory=True),
    Rule(UNKNOWN, "vLLM does not know this model", HF_TAKES_IT),
    Rule(HEADS, "vLLM has no attention for this model here", HF_TAKES_IT),
    Rule(
        LENGTH,
        "the sequences are longer than the model takes",
        "lower rollout.sampling.max_new_tokens or max_prompt_length",
    ),
    Rule(SPLIT, "the tensor-parallel size does not fit", "change rollout.resources.tensor_parallel_size"),
    Rule(
        BUILD,
        "vLLM does not run with this torch, CUDA or driver",
        "install it with a file of the plugin's folder constraints/, in an environment of its own",
    ),
    Rule(
        PROCESS,
        "this process cannot take an engine (another start failed in it, or torch.distributed is in use)",
        "set rollout.options.process: child, or begin a new process",
    ),
    Rule(
        COMPILER,
        "compiling for the engine failed: there is no C++ compiler",
        "set rollout.options.enforce_eager: true, or install g++",
    ),
)
EXPLAINER = Explainer(WHO, RULES, "VLLM_LOGGING_LEVEL=INFO makes it say more")
