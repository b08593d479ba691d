"""What the types alone cannot say: names of stages, references between them, choices that exclude."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from posttune.config.document import Document, Keys
from posttune.config.models import (
    STAGES,
    ConvertStage,
    EvaluateStage,
    KLConfig,
    ModelConfig,
    OptimizerConfig,
    RewardModelStage,
    RlStage,
    RunConfig,
    SftStage,
    Stage,
    ValidationConfig,
)
from posttune.config.places import named_plugins
from posttune.errors import Problem

DATA_KINDS = ("convert",)
MODEL_KINDS = ("sft", "rl", "export")
TRAINING_KINDS = ("sft", "reward_model", "rl")
SCALAR_KINDS = ("reward_model",)
MODEL_REWARD = "model"  # the reward whose path may name an earlier stage


@dataclass(frozen=True)
class Reference:
    """A value that may name an earlier stage, and the kinds of stage that it may name."""

    path: Keys
    value: str
    kinds: tuple[str, ...]


def fill_kinds(document: Document) -> None:
    """Give every stage without a kind the kind of its name, where there is one."""
    stages = document.data.get("stages")
    for name, stage in stages.items() if isinstance(stages, dict) else ():
        if isinstance(stage, dict) and "kind" not in stage and name in STAGES:
            stage["kind"] = name


def rule_problems(document: Document) -> list[Problem]:
    """The problems of every stage that has the right types; the others are the schema's to report."""
    stages = document.data.get("stages")
    if not isinstance(stages, dict):
        return []
    problems = [problem for name in stages for problem in _name_problems(document, name)]
    kinds = {name: str(stage.get("kind")) for name, stage in stages.items() if isinstance(stage, dict)}
    problems += _label_problems(document)
    for name in kinds:
        path: Keys = ("stages", name)
        for reference in references(stages[name], path):
            problems += _reference_problems(document, name, reference, kinds)
        stage = _stage(stages[name])
        if stage is not None:
            problems += _stage_problems(document, path, stage)
    return problems


def references(stage: Mapping[str, Any], path: Keys = ()) -> Iterator[Reference]:
    """Every value of a stage, as plain data, that may name an earlier stage."""
    kind = stage.get("kind")
    if kind in TRAINING_KINDS or kind in ("evaluate", "export"):
        also = SCALAR_KINDS if kind in ("reward_model", "export") else ()
        yield from _reference(stage, "model", (*MODEL_KINDS, *also), path)
    if kind in TRAINING_KINDS or kind == "evaluate":
        yield from _reference(stage, "data", DATA_KINDS, path)
    critic = stage.get("critic")
    if kind == "rl" and isinstance(critic, Mapping):
        yield from _reference(critic, "model", (*MODEL_KINDS, *SCALAR_KINDS), (*path, "critic"))
    if kind == "convert":
        yield from _reference(stage, "tokenizer", MODEL_KINDS, path)
    yield from _reward_references(stage, path)
    for key in ("evaluate", "holdout"):
        inner = stage.get(key)
        if kind in TRAINING_KINDS and isinstance(inner, Mapping):
            yield from _reference(inner, "data", DATA_KINDS, (*path, key))
            yield from _reward_references(inner, (*path, key))


def _reward_references(data: Mapping[str, Any], path: Keys) -> Iterator[Reference]:
    rewards = data.get("rewards")
    for index, ref in enumerate(rewards if isinstance(rewards, list) else ()):
        if isinstance(ref, Mapping) and ref.get("name") == MODEL_REWARD:
            options = ref.get("options")
            if isinstance(options, Mapping):
                yield from _reference(options, "path", SCALAR_KINDS, (*path, "rewards", index, "options"))


def _reference(data: Mapping[str, Any], key: str, kinds: tuple[str, ...], path: Keys) -> Iterator[Reference]:
    value = data.get(key)
    if isinstance(value, Mapping):
        yield from _reference(value, "path", kinds, (*path, key))
    elif isinstance(value, str):
        yield Reference((*path, key), value, kinds)


def _stage(data: Any) -> Stage | None:
    model = STAGES.get(str(data.get("kind"))) if isinstance(data, dict) else None
    try:
        return model.model_validate(data) if model else None
    except ValidationError:
        return None


def _name_problems(document: Document, name: str) -> Iterator[Problem]:
    path: Keys = ("stages", name)
    if name in RunConfig.model_fields:
        yield document.problem(path, "a stage cannot bear the name of a top-level key; rename it")
    elif not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", name):
        yield document.problem(path, "the name of a stage is made of letters, digits, _ and -")


def _stage_problems(document: Document, path: Keys, stage: Stage) -> Iterator[Problem]:
    if isinstance(stage, SftStage | RewardModelStage | RlStage):
        yield from _training_problems(document, path, stage)
    if isinstance(stage, RlStage):
        yield from _rl_problems(document, path, stage)
    if isinstance(stage, SftStage | RewardModelStage | RlStage | EvaluateStage):
        yield from _model_problems(document, (*path, "model"), stage.model)
    if isinstance(stage, ConvertStage) and not stage.source:
        yield document.problem((*path, "source"), "names no file")


def _reference_problems(
    document: Document, name: str, reference: Reference, kinds: Mapping[str, str]
) -> Iterator[Problem]:
    if reference.value not in kinds:
        return
    order = list(kinds)
    target, kind = reference.value, kinds[reference.value]
    if target == name:
        message = "a stage cannot refer to itself"
    elif order.index(target) > order.index(name):
        message = f"stage {target!r} comes later; a stage can use only what earlier stages made"
    elif kind not in reference.kinds:
        message = f"stage {target!r} is of kind {kind}; expected one of kind {' or '.join(reference.kinds)}"
    else:
        return
    yield document.problem(reference.path, message)


def _model_problems(document: Document, path: Keys, model: str | ModelConfig) -> Iterator[Problem]:
    if isinstance(model, str):
        return
    if (model.path is None) == (model.init is None):
        yield document.problem(path, "give either path (a model that exists) or init (a new one)")
    if model.init is not None and not isinstance(model.init.get("model_type"), str):
        yield document.problem((*path, "init"), "needs model_type, such as llama")
    if model.init is not None and model.tokenizer is None:
        yield document.problem(path, 'a new model needs a tokenizer: a folder, or "bytes"')


def _training_problems(
    document: Document, path: Keys, stage: SftStage | RewardModelStage | RlStage
) -> Iterator[Problem]:
    if (stage.steps is None) == (stage.epochs is None):
        yield document.problem(path, "give either steps or epochs")
    yield from _optimizer_problems(document, (*path, "optimizer"), stage.optimizer)
    if not isinstance(stage, RewardModelStage) and stage.evaluate is not None:
        yield from _validation_problems(document, (*path, "evaluate"), stage.evaluate)


def _optimizer_problems(document: Document, path: Keys, optimizer: OptimizerConfig) -> Iterator[Problem]:
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        yield document.problem((*path, "betas"), f"must lie in [0, 1), not {optimizer.betas}")


def _validation_problems(document: Document, path: Keys, evaluate: ValidationConfig) -> Iterator[Problem]:
    stop = evaluate.stop
    if stop is not None and not stop.metric.startswith("val/"):
        suggestion = f"val/{stop.metric}"
        yield document.problem((*path, "stop", "metric"), "is no metric of the validation", suggestion)


def _rl_problems(document: Document, path: Keys, stage: RlStage) -> Iterator[Problem]:
    if stage.rollout.sampling.temperature == 0:
        message = "must be above 0: greedy answers of one prompt are all the same"
        yield document.problem((*path, "rollout", "sampling", "temperature"), message)
    if stage.batch.mini_batches > stage.batch.prompts * stage.rollout.sampling.n:
        message = "more mini-batches than samples in a step"
        yield document.problem((*path, "batch", "mini_batches"), message)
    yield from _kl_problems(document, (*path, "kl"), stage.kl)
    if stage.critic is not None:
        inner: Keys = (*path, "critic")
        yield from _optimizer_problems(document, (*inner, "optimizer"), stage.critic.optimizer)
        if stage.critic.model is not None:
            yield from _model_problems(document, (*inner, "model"), stage.critic.model)


def _kl_problems(document: Document, path: Keys, kl: KLConfig) -> Iterator[Problem]:
    if kl.target is not None and kl.where == "none":
        yield document.problem((*path, "target"), "has no effect while where is none")
    if kl.where == "loss" and kl.estimator == "k1":
        message = "k1 in the loss has a gradient of zero mean: it restrains nothing"
        yield document.problem((*path, "estimator"), message, "k3")


def _label_problems(document: Document) -> Iterator[Problem]:
    """Labels must be unique in every list of plugins: metrics and columns carry them."""
    seen: set[tuple[Keys, str]] = set()
    for named in named_plugins(document.data):
        if not isinstance(named.path[-1], int):
            continue
        entry = (named.path[:-1], named.ref.tag)
        if entry in seen:
            message = f"another one is labelled {named.ref.tag!r}; give this one a label of its own"
            yield document.problem(named.path, message)
        seen.add(entry)
