"""What a training stage's configuration must fulfil, beyond types. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from posttune.advantage.requirements import unmet
from posttune.config.models import RewardModelStage, RlStage, SftStage, ValidationConfig
from posttune.errors import ConfigError, Problem
from posttune.facade import build_estimator
from posttune.nearest import nearest
from posttune.pipeline import validate_options
from posttune.trainer.memory_checks import memory_problems


def check_stage(name: str, stage: SftStage | RewardModelStage | RlStage, *, world: int = 1) -> None:
    """Raise ConfigError with everything that is wrong with the stage. Loads its advantage estimator."""
    problems = [*_count(name, stage), *memory_problems(name, stage)]
    if not isinstance(stage, RewardModelStage):
        problems += _validation(name, stage.evaluate)
    problems += _best(name, stage)
    problems += _rl(name, stage, world) if isinstance(stage, RlStage) else _batch(name, stage, world)
    if problems:
        raise ConfigError(problems)


def _count(name: str, stage: SftStage | RewardModelStage | RlStage) -> Iterator[Problem]:
    if (stage.steps is None) == (stage.epochs is None):
        count = "both steps and epochs are" if stage.steps else "neither steps nor epochs is"
        yield Problem(f"stages.{name}.steps", f"{count} given; give exactly one of the two")


def _validation(name: str, evaluate: ValidationConfig | None) -> Iterator[Problem]:
    if evaluate is not None and evaluate.stop is not None:
        known, metric = validation_metrics(evaluate), evaluate.stop.metric
        if metric not in known:
            message = f"no validation gives {metric!r}; it gives {', '.join(known)}"
            path = f"stages.{name}.evaluate.stop.metric"
            yield Problem(path, message, suggestion=nearest(metric, known) or "")


def _best(name: str, stage: SftStage | RewardModelStage | RlStage) -> Iterator[Problem]:
    best, path = stage.checkpoint.best, f"stages.{name}.checkpoint.keep_best"
    if best is None:
        return
    if isinstance(stage, RewardModelStage):
        known = [f"val/{each}" for each in ("accuracy", "loss", "margin")]
        if stage.holdout.data is None and stage.holdout.fraction == 0:
            yield Problem(path, "no pairs are held out, whose metric it could be: give holdout a fraction")
            return
    elif stage.evaluate is None:
        yield Problem(path, "the stage has no validation, whose metric it could be: give it evaluate")
        return
    else:
        known = validation_metrics(stage.evaluate)
    if best.metric not in known:
        message = f"no validation gives {best.metric!r}; it gives {', '.join(known)}"
        yield Problem(path, message, suggestion=nearest(best.metric, known) or "")


def validation_metrics(config: ValidationConfig) -> list[str]:
    """The metrics of a validation by which a stage may end."""
    names = ["accuracy", *([f"pass@{config.sampling.n}"] if config.sampling.n > 1 else [])]
    names += [f"reward/{reward.tag}/mean" for reward in config.rewards[1:]]
    return [f"val/{name}" for name in names]


def _batch(name: str, stage: SftStage | RewardModelStage, world: int) -> Iterator[Problem]:
    if stage.batch_size < world:
        what = "pairs" if isinstance(stage, RewardModelStage) else "sequences"
        message = f"{stage.batch_size} {what} cannot be shared by {world} processes; give at least one each"
        yield Problem(f"stages.{name}.batch_size", message)


def _rl(name: str, stage: RlStage, world: int) -> Iterator[Problem]:
    sampling, batch, where = stage.rollout.sampling, stage.batch, f"stages.{name}"
    if sampling.temperature == 0:
        message = "greedy answers have no log-probabilities to learn from; sample with a temperature above 0"
        yield Problem(f"{where}.rollout.sampling.temperature", message)
    if batch.prompts < world:
        message = f"{batch.prompts} prompts cannot be shared by {world} processes; give at least one each"
        yield Problem(f"{where}.batch.prompts", message)
    if batch.mini_batches > batch.prompts:
        message = (
            f"{batch.prompts} prompts make no {batch.mini_batches} mini-batches; a prompt is never split"
        )
        yield Problem(f"{where}.batch.mini_batches", message)
    if stage.kl.where == "loss" and stage.kl.estimator == "k1":
        message = "k1 in the loss has an expected gradient of 0; use k3, k2 or k1+, or where: reward"
        yield Problem(f"{where}.kl.estimator", message, suggestion="k3")
    yield from _dropping(where, stage)
    yield from _estimator(where, stage)


def _dropping(where: str, stage: RlStage) -> Iterator[Problem]:
    """What can be said of options that leave out prompts whose rewards are all equal."""
    asked = [
        *(["batch.drop_constant_groups"] if stage.batch.drop_constant_groups else []),
        *(["dynamic_sampling"] if stage.dynamic_sampling is not None else []),
    ]
    if stage.rollout.sampling.n < 2:
        for field in asked:
            message = "with one sample a prompt every prompt would be dropped; sample at least 2"
            yield Problem(f"{where}.{field}", message)
    mismatch = stage.mismatch
    if mismatch.floor > mismatch.cap:
        yield Problem(f"{where}.mismatch.floor", f"{mismatch.floor:g} lies above the cap, {mismatch.cap:g}")


def _estimator(where: str, stage: RlStage) -> Iterator[Problem]:
    traits = build_estimator(stage.advantage).traits
    options = validate_options("advantage_estimator", stage.advantage)
    critic = stage.critic is not None
    for problem in unmet(traits, options, samples_per_prompt=stage.rollout.sampling.n, critic=critic):
        yield Problem(f"{where}.{problem.path}", problem.message, suggestion=problem.suggestion)
    if critic and not traits.needs_critic:
        message = f"the estimator {stage.advantage.name} uses no critic; remove it, or take one such as gae"
        yield Problem(f"{where}.critic", message)
    if stage.critic is not None and stage.steps is not None and stage.critic.warmup_steps >= stage.steps:
        message = f"the critic would warm up in all {stage.steps} steps, and the policy never learn"
        yield Problem(f"{where}.critic.warmup_steps", message)
