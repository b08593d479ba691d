"""The ``export`` stage."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from posttune.checkpoint._export import export_model
from posttune.checkpoint.sources import open_source
from posttune.config.models import ExportStage

if TYPE_CHECKING:
    from posttune.run.stages import StageContext, StageResult


def run_export(stage: ExportStage, context: StageContext) -> StageResult:
    """Export the model of an earlier stage, a checkpoint or a folder. An older export gives way."""
    from posttune.run.stages import StageResult

    began = time.perf_counter()
    destination = Path(stage.to) if stage.to else context.folder.export
    base = None if stage.base is None else context.resolve(stage.base)
    source = open_source(context.resolve(stage.model), base=base, part=stage.part)
    exported = export_model(
        source, destination, dtype=stage.dtype, exporter=stage.exporter, replace=stage.to is None
    )
    metrics = {
        "parameters": exported.report.parameters,
        "dtype": exported.report.dtype,
        "max_abs_logit_difference": exported.verification.max_abs_logit_difference,
    }
    return StageResult(output=destination, metrics=metrics, seconds=time.perf_counter() - began)
