"""A toy task for reward models: an answer that is sorted is better than one that is not."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from posttune.config.models import RewardModelStage, RunConfig
from posttune.data.conversion import ConvertRequest, convert
from posttune.distributed.ranks import Ranks
from posttune.facade import build_observers
from posttune.run.folder import RunFolder
from posttune.run.stages import InterruptFlag, StageContext, StageResult
from posttune.testing.tiny import tiny_model
from posttune.trainer.stage import Setup

NAME = "judge"
MODEL = {"hidden": 64, "layers": 2, "heads": 2, "head_dim": 32}


def pairs(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Prompts with a sorted and an unsorted answer. Every third prompt has two pairs."""
    draw = random.Random(seed)
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        letters = draw.sample("abcdefghij", draw.randint(3, 5))
        best = "".join(sorted(letters))
        worse = {"".join(draw.sample(letters, len(letters))) for _ in range(4)} - {best}
        for other in sorted(worse)[: 2 if len(rows) % 3 == 0 else 1]:
            rows.append({"prompt": f"sort {''.join(letters)}: ", "chosen": best, "rejected": other})
    return rows[:count]


def write(rows: list[Any], path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_task(folder: Path, rows: int = 300, **model: Any) -> None:
    """``model``, ``rows.jsonl`` and ``data`` (tokenised) in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_model(folder / "model", **(MODEL | model))
    source = write(pairs(rows), folder / "rows.jsonl")
    convert(ConvertRequest([source], folder / "data", tokenizer=folder / "model"))


def stage(folder: Path, **fields: Any) -> dict[str, Any]:
    """A reward_model stage on the task."""
    base = {
        "kind": "reward_model",
        "model": str(folder / "model"),
        "data": str(folder / "data"),
        "batch_size": 8,
        "steps": 3,
        "optimizer": {"lr": 1e-3},
    }
    return base | fields


def context(output: Path, fields: Mapping[str, Any], **options: Any) -> StageContext:
    """What the runner hands to the stage, which is called ``NAME``."""
    ranks = options.get("ranks") or Ranks()
    config = {"output": str(output), "stages": {NAME: dict(fields)}, "observers": [{"name": "jsonl"}]}
    run = RunConfig.model_validate(config)
    return StageContext(
        run=run,
        name=NAME,
        folder=RunFolder(output),
        observers=build_observers(run.observers if ranks.main else []),
        resume=options.get("resume", False),
        outputs={},
        interrupt=InterruptFlag(),
        ranks=ranks,
    )


def run_stage(output: Path, fields: Mapping[str, Any], **options: Any) -> StageResult:
    """Run the stage in the run folder ``output``."""
    made = context(output, fields, **options)
    result: StageResult = _module().run_reward_model(made.run.stages[NAME], made)
    return result


def prepared(output: Path, fields: Mapping[str, Any], **options: Any) -> Setup:
    """The stage, ready for its first step."""
    made = context(output, fields, **options)
    config = made.run.stages[NAME]
    assert isinstance(config, RewardModelStage)
    setup: Setup = _module().prepare(config, made)
    return setup


def _module() -> Any:
    return import_module("posttune.trainer.reward_model")


def metrics(output: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def comparable(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line without what differs from run to run."""
    return {
        name: value
        for name, value in line.items()
        if not name.startswith(("time/", "memory/")) and name != "tokens_per_s"
    }
