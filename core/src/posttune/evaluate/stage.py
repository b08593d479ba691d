"""The stage ``evaluate``, and what it shares with the command: model, data, engine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from posttune.config.models import DataConfig, EvaluateStage, ModelConfig, PluginRef, RolloutConfig
from posttune.data.dataset import SampleDataset
from posttune.errors import Interrupted, ModelError, UserError
from posttune.evaluate.evaluate import evaluate
from posttune.evaluate.report import Evaluation
from posttune.facade import RolloutEngine, build_rewards, build_rollout
from posttune.files import atomic_dir
from posttune.models.load import LoadedModel, load_model
from posttune.rollout.requests import make_sampling
from posttune.run.stages import StageContext, StageResult
from posttune.types import Outcome, Resources, RolloutContext, RunInfo

FILES = ("evaluation.json", "samples.parquet")


@dataclass(frozen=True)
class Job:
    """One evaluation."""

    model: ModelConfig
    model_path: Path | None
    data: DataConfig
    data_path: Path
    rewards: Sequence[PluginRef]
    rollout: RolloutConfig
    by: Sequence[str]
    seed: int
    device: str
    cache: Path | None = None  # where tokens of a dataset without any go; beside the dataset where none


def run_evaluate(stage: EvaluateStage, context: StageContext) -> StageResult:
    """Evaluate, tell the observers, and leave ``evaluations/<stage>``: evaluation.json, samples.parquet."""
    began = time.perf_counter()
    job = _job(stage, context)
    with _reported(context):
        result = run_job(job, lambda done, total: _stop_if_asked(context, done, total))
        context.observers.step(context.name, 1, result.metrics())
        output = context.folder.path / "evaluations" / context.name
        write_evaluation(result, output)
    return StageResult(output, result.as_json(), time.perf_counter() - began)


def run_job(job: Job, progress: Callable[[int, int], None] | None = None) -> Evaluation:
    """Load the model and the data, start the engine, answer and judge."""
    rewards = build_rewards(job.rewards)  # resolved before any model loads
    dataset = SampleDataset(job.data_path)
    loaded = load_model(job.model, job.model_path, seed=job.seed, device=job.device)
    dataset = dataset.tokenized(
        loaded.tokenizer,
        max_length=job.data.max_length,
        truncation=job.data.truncation,
        cache_dir=job.cache,
    )
    sampling = make_sampling(job.rollout.sampling, loaded.eos_ids, logprobs=False)
    limit = min(len(dataset), job.data.limit or len(dataset))
    longest = int(dataset.prompt_lengths[:limit].max(initial=0)) + sampling.max_new_tokens
    check_length(loaded, longest)
    seed = job.seed if job.rollout.sampling.seed is None else job.rollout.sampling.seed
    with build_rollout(job.rollout) as engine:
        start(engine, job, loaded, longest)
        return evaluate(
            engine,
            loaded.tokenizer,
            dataset,
            rewards,
            sampling,
            limit,
            seed=seed,
            by=job.by,
            progress=progress,
        )


def start(engine: RolloutEngine, job: Job, loaded: LoadedModel, longest: int) -> None:
    """Start an engine for an evaluation."""
    asked = job.rollout.resources
    engine.start(
        RolloutContext(
            model_path=loaded.source,
            tokenizer=loaded.tokenizer,
            dtype=job.model.dtype,
            device=job.device,
            seed=job.seed,
            max_length=longest,
            resources=Resources(asked.memory_share, asked.tensor_parallel_size, asked.max_sequences),
            live_model=loaded.model,
        )
    )


def check_length(loaded: LoadedModel, longest: int) -> None:
    """Refuse sequences that are longer than the model's positions."""
    positions = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise ModelError(
            f"the longest prompt and max_new_tokens make {longest} tokens, the model takes {positions}",
            who="evaluate",
            fix="lower rollout.sampling.max_new_tokens, or set data.max_length and data.truncation",
        )


def check_output(folder: Path) -> None:
    """Refuse a place that holds anything else than an earlier evaluation, which is replaced."""
    if not folder.exists():
        return
    who, fix = f"{folder}", "name a new folder, or one that holds an earlier evaluation alone"
    if not folder.is_dir():
        raise UserError("is a file, and the evaluation is a folder", who=who, fix=fix)
    others = sorted(path.name for path in folder.iterdir() if path.name not in FILES)
    if others:
        raise UserError(f"holds something else than an evaluation: {others[0]}", who=who, fix=fix)


def write_evaluation(result: Evaluation, folder: Path) -> None:
    """Leave ``evaluation.json`` and ``samples.parquet``; what an earlier evaluation left there goes."""
    import pyarrow.parquet as pq

    check_output(folder)
    buffer = BytesIO()
    pq.write_table(result.table(), buffer, compression="zstd")
    with atomic_dir(folder, replace=True) as temporary:
        document = json.dumps(result.as_json(), indent=2, ensure_ascii=False)
        (temporary / "evaluation.json").write_text(document + "\n", "utf-8")
        (temporary / "samples.parquet").write_bytes(buffer.getvalue())


def _stop_if_asked(context: StageContext, done: int, total: int) -> None:
    if context.interrupt.is_set() and done < total:
        raise Interrupted(
            f"stopped after {done} of {total} prompts",
            who=f"stage {context.name!r}",
            fix="run the same command with --resume; this stage then begins anew",
        )


def _job(stage: EvaluateStage, context: StageContext) -> Job:
    model = ModelConfig(path=stage.model) if isinstance(stage.model, str) else stage.model
    data = DataConfig(path=stage.data) if isinstance(stage.data, str) else stage.data
    return Job(
        model=model,
        model_path=None if model.path is None else context.resolve(model.path),
        data=data,
        data_path=context.resolve(data.path),
        rewards=stage.rewards,
        rollout=stage.rollout,
        by=stage.by,
        seed=context.run.seed,
        device=str(context.ranks.device),
        cache=context.folder.data(f"{context.name}-tokenized"),
    )


@contextmanager
def _reported(context: StageContext) -> Iterator[None]:
    """Tell the observers of the stage's beginning, and of its end however it comes."""
    context.observers.run_start(
        RunInfo(
            folder=context.folder.path,
            name=context.run.name,
            stage=context.name,
            kind="evaluate",
            total_steps=1,
            first_step=0,
            config=context.run.told(),
        )
    )
    outcome = Outcome(context.name, "failed", 0, "ended by an error")
    try:
        yield
        outcome = Outcome(context.name, "finished", 1)
    except (Interrupted, KeyboardInterrupt) as error:
        outcome = Outcome(context.name, "interrupted", 0, str(error))
        raise
    except Exception as error:
        outcome = Outcome(context.name, "failed", 0, str(error))
        raise
    finally:
        context.observers.run_end(outcome)
