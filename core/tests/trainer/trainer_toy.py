"""A toy task for the trainers: tiny models, additions, runs without the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from posttune.checkpoint import dcp, store
from posttune.config.models import RunConfig
from posttune.data.conversion import ConvertRequest, convert
from posttune.distributed.ranks import Ranks
from posttune.facade import build_observers
from posttune.run.folder import RunFolder
from posttune.run.runner import stage_function
from posttune.run.stages import InterruptFlag, StageContext, StageResult
from posttune.testing.tiny import tiny_model
from posttune.trainer.loop import Position
from posttune.trainer.stage import Setup

TIMES = ("time/", "memory/")
EVERYTHING = ("jsonl", "rollouts", "tensorboard")
REWARDS = '''
def letters(prompt, response):
    """More lower-case letters are better."""
    return sum(character.islower() for character in response) / 8

def longer(prompt, response, **_):
    return len(response) / 8

def rare(prompt, response):
    """Few samples have it, so that those of a prompt are often all equal."""
    return float(response[:1].islower())

def seen(prompt, response, reference, **columns):
    return float(response.startswith(reference[0]))
'''


def make_task(folder: Path, rows: int = 24, **model: Any) -> None:
    """``model``, ``data`` (tokenised) and ``rewards.py`` in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(a, b) for a in range(10) for b in range(10)][:rows]
    lines = [json.dumps({"prompt": f"{a}+{b}=", "response": str(a + b), "level": a}) for a, b in pairs]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    tiny_model(folder / "model", **({"hidden": 32, "layers": 2, "heads": 2, "head_dim": 16} | model))
    convert(ConvertRequest([folder / "rows.jsonl"], folder / "data", tokenizer=folder / "model"))
    (folder / "rewards.py").write_text(REWARDS)


def sft(folder: Path, **fields: Any) -> dict[str, Any]:
    """An SFT stage on the task."""
    base = {
        "kind": "sft",
        "model": str(folder / "model"),
        "data": str(folder / "data"),
        "batch_size": 8,
        "steps": 3,
        "optimizer": {"lr": 1e-3},
    }
    return merged(base, fields)


def rl(folder: Path, **fields: Any) -> dict[str, Any]:
    """An RL stage on the task."""
    base = {
        "kind": "rl",
        "model": str(folder / "model"),
        "data": str(folder / "data"),
        "rollout": {"sampling": {"n": 4, "max_new_tokens": 6}},
        "rewards": [{"name": "function", "options": {"path": f"{folder / 'rewards.py'}:letters"}}],
        "batch": {"prompts": 4},
        "steps": 3,
        "optimizer": {"lr": 1e-3},
    }
    return merged(base, fields)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` laid over ``base``, mappings key by key."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def context(
    output: Path,
    stages: Mapping[str, Any],
    name: str,
    *,
    resume: bool = False,
    ranks: Ranks | None = None,
    interrupt: InterruptFlag | None = None,
    observers: tuple[str, ...] = ("jsonl", "rollouts"),
) -> StageContext:
    """What the runner hands to a stage."""
    ranks = ranks or Ranks()
    config = {
        "output": str(output),
        "stages": dict(stages),
        "observers": [{"name": each} for each in observers],
    }
    run = RunConfig.model_validate(config)
    return StageContext(
        run=run,
        name=name,
        folder=RunFolder(output),
        observers=build_observers(run.observers if ranks.main else []),
        resume=resume,
        outputs={},
        interrupt=InterruptFlag() if interrupt is None else interrupt,
        ranks=ranks,
    )


def run_stage(output: Path, stage: Mapping[str, Any], **options: Any) -> StageResult:
    """Run one stage, named as its kind, in the run folder ``output``."""
    name = stage["kind"]
    made = context(output, {name: stage}, name, **options)
    return stage_function(name)(made.run.stages[name], made)


def metrics(output: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def comparable(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line without what differs from run to run."""
    return {
        name: value
        for name, value in line.items()
        if not name.startswith(TIMES) and not name.endswith("tokens_per_s") and "/seconds_" not in name
    }


def rollouts(output: Path) -> dict[str, pa.Table]:
    """The tables of samples by file name."""
    return {path.name: pq.read_table(path) for path in sorted((output / "rollouts").glob("*.parquet"))}


def points(output: Path) -> list[tuple[str, int, float]]:
    """The points of TensorBoard's curves by name and step, without what differs from run to run.

    From the files themselves: a reader makes its own of steps that come twice.
    """
    from posttune.observers import _events
    from tensorboard.compat.proto.event_pb2 import Event

    found = []
    for path in (output / "tensorboard").rglob("*.tfevents.*"):
        for event in map(Event.FromString, _events.read(path)):
            for value in event.summary.value:
                if comparable({value.tag: 0}) and not value.tag.startswith("_hparams_"):
                    scalar = value.tensor.float_val[0] if value.tensor.float_val else value.simple_value
                    found.append((value.tag, event.step, scalar))
    return sorted(found)


def prepared(output: Path, stage: Mapping[str, Any], stack: ExitStack, **options: Any) -> Setup:
    """A stage that is ready for its first step; ``stack`` stops its engine."""
    name = stage["kind"]
    made = context(output, {name: stage}, name, **options)
    module = import_module(f"posttune.trainer.{name}")
    setup: Setup = module.prepare(made.run.stages[name], made, stack)
    setup.work.begin(Position())
    return setup


def take_steps(setup: Setup, count: int) -> list[dict[str, float]]:
    """The metrics of the first steps, without checkpoints and observers."""
    position, found = Position(), []
    for _ in range(count):
        output = setup.work.step(position)
        position = position.after(output.rows)
        found.append(output.metrics)
    return found


def weights(setup: Setup) -> dict[str, torch.Tensor]:
    """A copy of the present weights."""
    return {name: param.detach().clone() for name, param in setup.loaded.model.named_parameters()}


def assert_same_run(one: Path, other: Path, step: int) -> None:
    """Two run folders hold the same metrics, samples and checkpoint of ``step``."""
    first, second = metrics(one), metrics(other)
    assert [comparable(line) for line in first] == [comparable(line) for line in second]
    tables, others = rollouts(one), rollouts(other)
    assert list(tables) == list(others)
    assert all(table.equals(others[name]) for name, table in tables.items())
    assert_same_checkpoint(*(folder / "checkpoints" / f"global_step_{step}" for folder in (one, other)))


def assert_same_checkpoint(one: Path, other: Path) -> None:
    """Bit for bit, optimisers and random generators included."""
    assert store.read_state(one) == store.read_state(other)
    shapes = dcp.shapes(one / store.TENSORS)
    assert shapes == dcp.shapes(other / store.TENSORS)
    found = [
        {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()} for _ in range(2)
    ]
    for path, tensors in zip((one, other), found, strict=True):
        dcp.read_into(path / store.TENSORS, tensors)
    assert any(name.startswith("optimizer/") for name in shapes)
    assert any(name.startswith("rng/") for name in shapes)
    for name in shapes:
        assert torch.equal(found[0][name], found[1][name]), name
