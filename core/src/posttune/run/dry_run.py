"""Everything that can be known before a model is loaded. A real run makes the same checks first."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttune.catalog import Catalog
from posttune.config.document import Keys
from posttune.config.load import LoadedConfig
from posttune.config.models import (
    ConvertStage,
    EvaluateStage,
    ExportStage,
    ModelConfig,
    PluginRef,
    RewardModelStage,
    RlStage,
    SftStage,
    Stage,
)
from posttune.errors import ConfigError, PluginCallError, PluginReturnError, PosttuneError, Problem
from posttune.nearest import nearest
from posttune.run.data_checks import Demand, check_data
from posttune.run.folder import RunFolder
from posttune.run.resume import Step, make_plan
from posttune.run.reward_models import named_stage
from posttune.types import Needs, Sample

PROMPTS = ("prompt", "messages")
ANSWERS = ("response", "messages", "text")
PAIRS = ("chosen", "rejected")


@dataclass
class RunCheck:
    """What the checks found. ``facts`` tells what is known of each stage, by name."""

    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def raise_problems(self) -> None:
        """Raise ConfigError where there are problems."""
        if self.problems:
            raise ConfigError(self.problems, fix="nothing was run; `--dry-run` makes these checks alone")


def dry_run(loaded: LoadedConfig, resume: bool = False, world: int = 1) -> RunCheck:
    """Check a run in ``world`` processes without writing anything."""
    from posttune.distributed.ranks import Ranks
    from posttune.reward.loading import also_look_in

    also_look_in(loaded.folder)
    folder = RunFolder(loaded.config.output)
    where: Keys = ("device",)
    try:
        Ranks.current(loaded.config.device)
        where = ("parallel",)
        shares = loaded.config.parallel.layout(world).data
        where = ("output",)
        plan = make_plan(loaded.config, folder, resume)
    except PosttuneError as error:
        return RunCheck([loaded.document.problem(where, _sentence(error))])
    return check_run(loaded, folder, plan, shares)


def check_run(loaded: LoadedConfig, folder: RunFolder, plan: Sequence[Step], world: int = 1) -> RunCheck:
    """Check the stages that are left to run, each of whose batches ``world`` processes share."""
    return _Checker(loaded, folder, plan, world).check()


class _Checker:
    """Goes through a plan once, and collects."""

    def __init__(self, loaded: LoadedConfig, folder: RunFolder, plan: Sequence[Step], world: int) -> None:
        self.loaded, self.config, self.document = loaded, loaded.config, loaded.document
        self.folder, self.plan, self.world = folder, plan, world
        self.catalog = Catalog()
        self.found = RunCheck()
        self.demands: list[Demand] = []

    def check(self) -> RunCheck:
        """Every check, cheap ones first."""
        self._writable(self.folder.path, ("output",))
        for index, ref in enumerate(self.config.observers):
            self._build("observer", ref, ("observers", index))
        for step in self.plan:
            stage = self.config.stages[step.name]
            self.found.facts[step.name] = {"kind": stage.kind}
            if step.action == "skip":
                self.found.facts[step.name]["state"] = "finished before"
            else:
                self._stage(step.name, stage)
        check_data(self.loaded, self.folder, self.plan, self.demands, self.found)
        self.found.problems.sort(key=lambda problem: problem.line or 0)
        return self.found

    def _stage(self, name: str, stage: Stage) -> None:
        path: Keys = ("stages", name)
        if isinstance(stage, SftStage | RlStage | EvaluateStage):
            self._model(stage.model, (*path, "model"), generates=True)
        if isinstance(stage, SftStage | RewardModelStage | RlStage):
            self._training(name, stage, path)
        if isinstance(stage, RewardModelStage):
            self._reward_model(stage, path)
        if isinstance(stage, SftStage):
            self.demands.append(Demand((*path, "data"), stage.data, ANSWERS))
        if isinstance(stage, RlStage | EvaluateStage):
            self._build("rollout_backend", stage.rollout, (*path, "rollout"))
            needs = self._rewards(stage.rewards, (*path, "rewards"))
            if isinstance(stage, EvaluateStage) and stage.by:
                needs["by"] = Needs(columns=tuple(stage.by))
            self.demands.append(Demand((*path, "data"), stage.data, PROMPTS, needs))
        if isinstance(stage, RlStage):
            self._rl(stage, path)
            if stage.critic is not None and stage.critic.model is not None:
                self._model(stage.critic.model, (*path, "critic", "model"))
        if isinstance(stage, ExportStage):
            self._export(stage, path)
        if isinstance(stage, ConvertStage) and stage.to is not None:
            self._writable(Path(stage.to).expanduser(), (*path, "to"))

    def _training(self, name: str, stage: SftStage | RewardModelStage | RlStage, path: Keys) -> None:
        from posttune.trainer.checks import check_stage

        try:
            check_stage(name, stage, world=self.world)
        except ConfigError as error:
            for problem in error.problems:
                keys = tuple(problem.path.split("."))
                self.found.problems.append(self.document.problem(keys, problem.message, problem.suggestion))
        except PosttuneError as error:
            self._problem(path, error)
        if not isinstance(stage, RewardModelStage) and stage.evaluate is not None:
            inner = (*path, "evaluate")
            needs = self._rewards(stage.evaluate.rewards, (*inner, "rewards"))
            self.demands.append(Demand((*inner, "data"), stage.evaluate.data, PROMPTS, needs))

    def _reward_model(self, stage: RewardModelStage, path: Keys) -> None:
        self._model(stage.model, (*path, "model"))
        needs = {"a reward model": Needs(columns=PAIRS)}
        self.demands.append(Demand((*path, "data"), stage.data, (), needs))
        if stage.holdout.data is not None:
            self.demands.append(Demand((*path, "holdout", "data"), stage.holdout.data, (), needs))

    def _rl(self, stage: RlStage, path: Keys) -> None:
        self._build("policy_loss", stage.loss, (*path, "loss"))
        self._build("advantage_estimator", stage.advantage, (*path, "advantage"))
        with self._noted((*path, "reward_manager")):
            _try_manager(stage.reward_manager, [ref.tag for ref in stage.rewards])
        sampling = stage.rollout.sampling
        for key, truncates in (("top_p", sampling.top_p < 1), ("top_k", sampling.top_k > 0)):
            if truncates:
                message = "cuts the sampling distribution, and so biases the ratio that the loss is made of"
                place = (*path, "rollout", "sampling", key)
                self.found.warnings.append(self.document.problem(place, message))

    def _export(self, stage: ExportStage, path: Keys) -> None:
        self._build("checkpoint_exporter", stage.exporter, (*path, "exporter"))
        self._model(stage.model, (*path, "model"))
        if stage.to is not None:
            target = Path(stage.to).expanduser()
            self._writable(target, (*path, "to"))
            if target.is_dir() and any(target.iterdir()):
                message = f"{target} is not empty, and an export replaces nothing"
                self.found.problems.append(self.document.problem((*path, "to"), message))

    def _rewards(self, refs: Sequence[PluginRef], path: Keys) -> dict[str, Needs]:
        """What each reward needs. Resolving them here imports functions given by path."""
        from posttune.facade import build_rewards

        needs: dict[str, Needs] = {}
        for index, ref in enumerate(refs):
            if named_stage(ref) in self.config.stages:
                continue  # its model is still to be trained; the options were validated with the rest
            with self._noted((*path, index)):
                needs[f"reward {ref.tag!r}"] = build_rewards([ref]).needs[ref.tag]
        return needs

    def _build(self, kind: str, ref: PluginRef, path: Keys) -> None:
        from posttune.pipeline import compose

        with self._noted(path):
            compose(kind, [ref], catalog=self.catalog)

    def _model(self, model: str | ModelConfig, path: Keys, *, generates: bool = False) -> None:
        config = ModelConfig(path=model) if isinstance(model, str) else model
        if config.path in self.config.stages:
            return
        place = path if isinstance(model, str) else (*path, "path" if config.path else "init")
        with self._noted(place, near=config.path):
            _check_model(config, generates)

    def _writable(self, target: Path, path: Keys) -> None:
        """Whether a folder can be made at ``target``, or written to."""
        existing = next(place for place in (target, *target.absolute().parents) if place.exists())
        if not existing.is_dir():
            self.found.problems.append(self.document.problem(path, f"{existing} is a file, not a folder"))
        elif not os.access(existing, os.W_OK | os.X_OK):
            self.found.problems.append(self.document.problem(path, f"{existing} cannot be written to"))

    @contextmanager
    def _noted(self, path: Keys, near: str | None = None) -> Iterator[None]:
        """Turn an error of posttune into a problem at ``path``."""
        try:
            yield
        except PosttuneError as error:
            self._problem(path, error, near)

    def _problem(self, path: Keys, error: PosttuneError, near: str | None = None) -> None:
        suggestion = nearest(near, self.config.stages) if near else ""
        self.found.problems.append(self.document.problem(path, _sentence(error), suggestion))


def _try_manager(ref: PluginRef, labels: Sequence[str]) -> None:
    """Build a reward manager and give it a sample that nothing could score, so that it sees the labels.

    What it makes of a sample without tokens is no fair test: only its own complaints count.
    """
    from posttune.facade import build_manager

    manager = build_manager(ref)
    sample = Sample(id="dry run", group="dry run", prompt="", response="")
    with suppress(PluginCallError, PluginReturnError):
        manager.combine([sample], {label: [None] for label in labels})


def _check_model(config: ModelConfig, generates: bool) -> None:
    """A model's folder, configuration and tokenizer; no weights are read."""
    from posttune.checkpoint.sources import open_source
    from posttune.models.hf_folder import refuse_classifier
    from posttune.models.load import check_vocabulary, new_config
    from posttune.models.tokenizer import load_tokenizer

    if config.path is None:
        tokenizer = load_tokenizer(config.tokenizer or "")
        new_config(config.init or {}, tokenizer)
        return
    source = open_source(Path(config.path).expanduser())
    if generates:
        refuse_classifier(source.config, who=f"model {config.path}")
    tokenizer = load_tokenizer(config.tokenizer or source.tokenizer_dir)
    check_vocabulary(source.config, tokenizer)


def _sentence(error: PosttuneError) -> str:
    text = f"{error.who}: {error.what}" if error.who else error.what
    return f"{text} (next: {error.fix})" if error.fix else text
