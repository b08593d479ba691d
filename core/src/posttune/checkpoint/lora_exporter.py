"""The ``lora_adapter`` exporter: the adapters alone, for peft, vLLM and SGLang."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from posttune.config.models import Strict
from posttune.hookspecs import hookimpl
from posttune.types import ExportReport, Verification

if TYPE_CHECKING:
    from posttune.checkpoint.sources import ModelSource

NAME = "lora_adapter"


class LoraAdapterExporter:
    """adapter_model.safetensors, adapter_config.json, the tokenizer and a model card."""

    class Config(Strict):
        """No options."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def checkpoint_exporter_export(self, source: ModelSource, destination: Path, dtype: str) -> ExportReport:
        """Write the folder. "keep" is the type that the adapters were trained in."""
        from posttune.checkpoint._adapter import write_adapter

        return write_adapter(source, destination, dtype)

    @hookimpl
    def checkpoint_exporter_verify(self, source: ModelSource, destination: Path) -> Verification:
        """Compare every tensor, and the logits of the base model with the adapters that peft loads."""
        from posttune.checkpoint._adapter import verify_adapter

        return verify_adapter(source, destination)
