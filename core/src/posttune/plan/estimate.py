"""Memory of each phase of a stage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from posttune.config.models import CriticConfig, ModelConfig, RewardModelStage, RlStage, RunConfig, SftStage
from posttune.errors import UserError
from posttune.plan import parts
from posttune.plan.shapes import ModelShape, model_shape

Trained = SftStage | RewardModelStage | RlStage
PROMPT = 512  # tokens of a prompt of which nothing is known
SHARES_WEIGHTS = frozenset({"hf"})  # engines that compute with the trainer's own module


@dataclass(frozen=True)
class PhasePlan:
    """Bytes on one device in one phase, by what takes them."""

    name: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class StagePlan:
    """A stage: its phases on each of the devices, and what waits in the host's memory, in bytes."""

    stage: str
    phases: list[PhasePlan]
    host: int
    assumed: list[str] = field(default_factory=list)

    @property
    def peak(self) -> PhasePlan:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.total)


@dataclass(frozen=True)
class Setting:
    """What a plan is made for."""

    gpus: int = 1
    device_bytes: int | None = None  # of one device; only an engine's share needs it
    prompt_tokens: int | None = None


def plan_run(run: RunConfig, setting: Setting) -> list[StagePlan]:
    """A plan of every stage that trains. Raises UserError and ModelError."""
    found = []
    for name, stage in run.stages.items():
        if isinstance(stage, Trained):
            found.append(_Planner(run, name, stage, setting).plan())
    if not found:
        raise UserError("no stage trains a model", who="plan", fix="give a configuration that has one")
    return found


class _Planner:
    """Makes the plan of one stage."""

    def __init__(self, run: RunConfig, name: str, stage: Trained, setting: Setting) -> None:
        self.run, self.name, self.stage, self.setting = run, name, stage, setting
        self.assumed: list[str] = []
        self.away = set(stage.memory.offload)
        self.model = _as_config(stage.model)
        scalar = isinstance(stage, RewardModelStage)
        self.policy = model_shape(self.model, self._folder(self.model), scalar=scalar)
        layout = run.parallel.layout(setting.gpus)
        self.cut = layout.shard * layout.tensor

    def plan(self) -> StagePlan:
        """The plan."""
        if not isinstance(self.stage, RlStage):
            phase = self._update("update", "model", self.policy, self.model, self.stage)
            return StagePlan(self.name, [phase], self._host({}), self.assumed)
        return self._rl(self.stage)

    def _rl(self, stage: RlStage) -> StagePlan:
        critic = None if stage.critic is None else self._critic(stage.critic)
        reference = stage.kl.where != "none" and self.model.lora is None
        idle = {"policy": self.policy.bytes, "reference": self.policy.bytes if reference else 0}
        idle["critic"] = 0 if critic is None else critic[0].bytes
        idle["policy moments"] = self._kept_moments(self.policy, stage)
        if critic is not None and stage.critic is not None:
            idle["critic moments"] = self._kept_moments(critic[0], stage.critic)
        phases = [self._phase("rollout", self._engine(stage), idle, set())]
        if critic is not None:
            forward = {"activations": parts.passing(critic[0], self._tokens)}
            phases.append(self._phase("values", forward, idle, {"critic"}))
        forward = {
            "activations": parts.passing(self.policy, self._tokens),
            "logits": parts.logits(self.policy, stage.memory, self._tokens),
        }
        phases.append(self._phase("logprob", forward, idle, {"reference"} if reference else {"policy"}))
        if critic is not None and stage.critic is not None:
            more = self._learning(critic[0], critic[1], stage.critic, head=False)
            phases.append(self._phase("critic", more, idle, {"critic", "critic moments"}))
        more = self._learning(self.policy, self.model, stage, head=True)
        phases.append(self._phase("update", more, idle, {"policy", "policy moments"}))
        weights = 0 if stage.rollout.name in SHARES_WEIGHTS else self.policy.weights * self.policy.item
        phases.append(self._phase("hand over", {"engine weights": weights}, idle, {"policy"}))
        return StagePlan(self.name, phases, self._host(idle), self.assumed)

    @property
    def _tokens(self) -> int:
        """Of one forward pass: as many as are allowed, or as there are."""
        allowed = self.stage.packing.micro_batch_tokens
        if not isinstance(self.stage, RlStage):
            return allowed
        return min(allowed, math.prod(self._sequences(self.stage)))

    @cached_property
    def prompt_tokens(self) -> int:
        """Of the longest prompt."""
        known = self.setting.prompt_tokens or getattr(self.stage, "max_prompt_length", None)
        if known is None:
            self.assumed.append(f"prompts of {PROMPT} tokens; --prompt-tokens says otherwise")
        return int(known or PROMPT)

    def _phase(
        self, name: str, more: Mapping[str, int], idle: Mapping[str, int], used: set[str]
    ) -> PhasePlan:
        """What is idle stays on the device unless it waits on the host; what is used is there."""
        there = {
            key: size // self.cut for key, size in idle.items() if size and (key in used or self._stays(key))
        }
        return PhasePlan(name, {**there, **{key: size for key, size in more.items() if size}})

    def _stays(self, key: str) -> bool:
        return ("optimizer" if key.endswith("moments") else key) not in self.away

    def _learning(
        self, shape: ModelShape, model: ModelConfig, config: Trained | CriticConfig, *, head: bool
    ) -> dict[str, int]:
        optimizer = config.optimizer
        visiting = parts.moments_on_device(shape, optimizer) if optimizer.offload else 0
        return {
            "gradients": parts.gradients(shape, optimizer) // self.cut,
            "visiting moments": visiting // self.cut,
            "activations": parts.activations(shape, model, self.stage.memory, self._tokens),
            "logits": parts.logits(shape, self.stage.memory, self._tokens) if head else 0,
        }

    def _kept_moments(self, shape: ModelShape, config: Trained | CriticConfig) -> int:
        return 0 if config.optimizer.offload else parts.moments(shape, config.optimizer)

    def _update(
        self, name: str, key: str, shape: ModelShape, model: ModelConfig, stage: Trained
    ) -> PhasePlan:
        idle = {key: shape.bytes, "moments": self._kept_moments(shape, stage)}
        head = not isinstance(stage, RewardModelStage)
        return self._phase(name, self._learning(shape, model, stage, head=head), idle, set(idle))

    def _critic(self, config: CriticConfig) -> tuple[ModelShape, ModelConfig]:
        model = self.model if config.model is None else _as_config(config.model)
        return model_shape(model, self._folder(model), scalar=True), model

    def _engine(self, stage: RlStage) -> dict[str, int]:
        rollout, share = stage.rollout, stage.rollout.resources.memory_share
        count, length = self._sequences(stage)
        count = min(count, rollout.resources.max_sequences or count)
        cache = parts.cache(self.policy, count, length, self.policy.item)
        if rollout.name in SHARES_WEIGHTS:
            return {"cache": cache}
        self.assumed.append(f"the engine {rollout.name} sleeps while models learn")
        if share is not None and self.setting.device_bytes is not None:
            return {"engine": int(share * self.setting.device_bytes)}
        return {"engine weights": self.policy.bytes, "cache": cache}

    def _sequences(self, stage: RlStage) -> tuple[int, int]:
        """How many a process answers in a step, and how long the longest can be."""
        sampling = stage.rollout.sampling
        count = -(-stage.batch.prompts * sampling.n // self.setting.gpus)
        return count, self.prompt_tokens + sampling.max_new_tokens

    def _host(self, idle: Mapping[str, int]) -> int:
        waiting = sum(size for key, size in idle.items() if not self._stays(key))
        for config, shape in self._optimized():
            if config.optimizer.offload:
                waiting += parts.moments(shape, config.optimizer)
        return waiting

    def _optimized(self) -> list[tuple[Trained | CriticConfig, ModelShape]]:
        critic = self.stage.critic if isinstance(self.stage, RlStage) else None
        more = [] if critic is None else [(critic, self._critic(critic)[0])]
        return [(self.stage, self.policy), *more]

    def _folder(self, model: ModelConfig) -> Path | None:
        """Where config.json lies: of an earlier stage, where its own model's does."""
        path, seen = model.path, set()
        while path in self.run.stages and path not in seen:
            seen.add(path)
            earlier = self.run.stages[path]
            source = getattr(earlier, "model", None)
            if source is None:
                break
            given = _as_config(source)
            if given.path is None:
                raise UserError(
                    f"the model of stage {path!r} is made anew",
                    who=f"stages.{self.name}.model",
                    fix="plan that stage; a later one takes as much",
                )
            path = given.path
        return None if path is None else Path(path).expanduser()


def _as_config(model: str | ModelConfig) -> ModelConfig:
    return ModelConfig(path=model) if isinstance(model, str) else model
