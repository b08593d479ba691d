"""The options that vLLM alone has; sampling and resources are core's."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from posttune.engines.options import CommonOptions
from pydantic import Field, field_validator, model_validator

MEGABYTE = 1 << 20


class VllmOptions(CommonOptions):
    """Options of the `vllm` engine."""

    process: Literal["child", "inline"] = Field(
        "child",
        description="Where the engine runs: in a process of its own, whose end this one survives; or in the "
        "trainer's own, which starts and hands weights over faster.",
    )
    server: str | None = Field(
        None, description="http://host:port of a vLLM server that you launched; no engine is started then."
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Share of the GPU's memory that the engine may take, weights included. Defaults to "
        "resources.memory_share, else to 0.45 beside a trainer and 0.9 alone.",
    )
    enforce_eager: bool | None = Field(
        None, description="No compilation and no CUDA graphs. Defaults to true on a CPU and false on a GPU."
    )
    logprobs: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Log-probabilities of the sampled tokens: where the trainer asks for them, always, or "
        "never. They cost vLLM about a fifth of its speed.",
    )
    lora_rank: int = Field(
        0, ge=0, le=512, description="Largest rank of adapters that are loaded as such; 0: none are."
    )
    request_timeout_s: float = Field(600.0, gt=0, description="Seconds for one request to a server.")
    retries: int = Field(
        3, ge=0, description="Further attempts of a server's request that failed in passing."
    )
    shared_folder: str | None = Field(
        None,
        description="Folder that this machine and the server's share, for weights. Defaults to /dev/shm, "
        "which does for a server on this machine.",
    )
    token_env: str | None = Field(None, description="Environment variable that holds the server's API key.")
    engine: dict[str, Any] = Field(
        default_factory=dict,
        description="Further arguments of vLLM's EngineArgs, checked against its own names.",
    )

    @property
    def needs_engine(self) -> bool:
        """Whether vLLM must be installed here; core asks before it refuses."""
        return self.server is None

    @field_validator("server")
    @classmethod
    def _is_http(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise ValueError("write http://host:port, without a path")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _server_alone(self) -> VllmOptions:
        mine = {"process", "gpu_memory_utilization", "cache_mb", "enforce_eager", "dtype", "prefix_caching"}
        clash = sorted((mine | {"engine", "lora_rank"}) & self.model_fields_set)
        if self.server is not None and clash:
            raise ValueError(f"{', '.join(clash)}: said to the server when it is launched, not here")
        return self
