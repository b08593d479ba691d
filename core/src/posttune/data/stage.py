"""The ``convert`` stage of a run."""

from __future__ import annotations

import time
from pathlib import Path

from posttune.config.models import ConvertStage
from posttune.data.conversion import ConvertRequest, convert
from posttune.data.dataset import SampleDataset
from posttune.data.progress import conversion_bar
from posttune.models.tokenizer import BYTES
from posttune.run.stages import StageContext, StageResult


def run_convert(stage: ConvertStage, context: StageContext) -> StageResult:
    """Convert the stage's sources; its output is the dataset folder. Rank 0 alone is called."""
    began = time.perf_counter()
    with conversion_bar(context.name) as progress:
        request = ConvertRequest(
            sources=[stage.source] if isinstance(stage.source, str) else stage.source,
            to=Path(stage.to) if stage.to is not None else context.folder.data(context.name),
            converter=stage.converter,
            map=stage.map,
            tokenizer=_tokenizer(stage, context),
            template=stage.template,
            on_bad_row=stage.on_bad_row,
            max_length=stage.max_length,
            truncation=stage.truncation,
            overwrite=stage.overwrite,
            progress=progress,
        )
        report = convert(request)
    lengths = SampleDataset(report.path).meta["lengths"]
    metrics = {
        "rows": report.rows_out,
        "rejected": len(report.rejected),
        "warnings": sum(warning["count"] for warning in report.warnings),
        f"{lengths['unit']}/mean": lengths["total"]["mean"],
        f"{lengths['unit']}/max": lengths["total"]["max"],
    }
    return StageResult(report.path, metrics, time.perf_counter() - began)


def _tokenizer(stage: ConvertStage, context: StageContext) -> str | Path | None:
    if stage.tokenizer is None or stage.tokenizer == BYTES:
        return stage.tokenizer
    return context.resolve(stage.tokenizer)
