"""The ``hf`` exporter: a folder for transformers, vLLM and SGLang."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from posttune.config.models import PositiveFloat, Strict
from posttune.hookspecs import hookimpl
from posttune.types import ExportReport, Verification

if TYPE_CHECKING:
    from posttune.checkpoint.sources import ModelSource


class HFExporter:
    """Safetensors with adapters merged, configuration, tokenizer, generation configuration, model card."""

    class Config(Strict):
        """Options of the exporter."""

        shard_gb: PositiveFloat = Field(5.0, description="Largest weight file, in 10^9 bytes.")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def checkpoint_exporter_export(self, source: ModelSource, destination: Path, dtype: str) -> ExportReport:
        """Write the folder."""
        from posttune.checkpoint._export import write_model

        return write_model(source, destination, dtype, shard_bytes=int(self.config.shard_gb * 1e9))

    @hookimpl
    def checkpoint_exporter_verify(self, source: ModelSource, destination: Path) -> Verification:
        """Compare every tensor, and the logits of the model that transformers loads."""
        from posttune.checkpoint._verify import verify_model

        return verify_model(source, destination)
