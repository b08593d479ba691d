"""The RL stage: everything that its steps need, made ready."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass

from posttune.config.models import RlStage
from posttune.facade import (
    Estimator,
    PolicyLoss,
    RewardManager,
    Rewards,
    RolloutEngine,
    build_estimator,
    build_loss,
    build_manager,
    build_rewards,
    build_rollout,
)
from posttune.loss.controllers import AdaptiveKL, FixedKL
from posttune.models.load import LoadedModel, load_reference
from posttune.rollout.requests import make_sampling
from posttune.run.stages import StageContext, StageResult
from posttune.trainer._inputs import Data, check_model_length, load_data, load_stage_model, longest_prompt
from posttune.trainer._prompts import PromptStream
from posttune.trainer._update import Objective, Updater
from posttune.trainer.checks import check_stage
from posttune.trainer.optimizer import Stepper, make_optimizer
from posttune.trainer.rl_step import RlWork
from posttune.trainer.stage import Setup, train
from posttune.trainer.validation import longest_answered, make_validation, rollout_context
from posttune.types import Sampling

log = logging.getLogger("posttune.trainer")


def run_rl(stage: RlStage, context: StageContext) -> StageResult:
    """Train on completions of the model itself; see ``RlWork.step`` for what a step does."""
    check_stage(context.name, stage, world=context.ranks.world)
    with ExitStack() as stack:
        return train(prepare(stage, context, stack), context)


@dataclass(frozen=True)
class Plugins:
    """The plugins of an RL stage."""

    engine: RolloutEngine
    rewards: Rewards
    manager: RewardManager
    estimator: Estimator
    loss: PolicyLoss

    @classmethod
    def of(cls, stage: RlStage) -> Plugins:
        """Compose them. Raises what ``posttune.facade`` raises."""
        return cls(
            engine=build_rollout(stage.rollout),
            rewards=build_rewards(stage.rewards),
            manager=build_manager(stage.reward_manager),
            estimator=build_estimator(stage.advantage),
            loss=build_loss(stage.loss),
        )


def prepare(stage: RlStage, context: StageContext, stack: ExitStack) -> Setup:
    """Compose the plugins, load the model and the data, start the engine. ``stack`` stops it."""
    plugins = Plugins.of(stage)
    loaded = load_stage_model(stage, context)
    data = load_data(stage.data, loaded, context)
    longest = longest_prompt(data, stage.max_prompt_length) + stage.rollout.sampling.max_new_tokens
    check_model_length(loaded, longest, "rollout.sampling.max_new_tokens")
    longest = max(longest, longest_answered(stage.evaluate, context, loaded))
    engine = stack.enter_context(plugins.engine)
    engine.start(rollout_context(stage.rollout, context, loaded, longest))
    validation = make_validation(stage.evaluate, context, loaded, stack, engine)
    optimizer = make_optimizer(loaded.model, stage.optimizer)
    work = _work(
        stage, context, plugins, loaded, data, Stepper(optimizer, stage.optimizer.grad_clip, context.ranks)
    )
    return Setup(stage, loaded, optimizer, work, work.total_steps, data.dataset.fingerprint, validation)


def _work(
    stage: RlStage,
    context: StageContext,
    plugins: Plugins,
    loaded: LoadedModel,
    data: Data,
    stepper: Stepper,
) -> RlWork:
    ranks, asked = context.ranks, stage.rollout.sampling
    sampling = make_sampling(asked, loaded.eos_ids)
    warn_of_truncated_sampling(sampling)
    seed = context.run.seed if asked.seed is None else asked.seed
    return RlWork(
        config=stage,
        total_steps=data.steps(stage, stage.batch.prompts),
        loaded=loaded,
        reference=load_reference(loaded) if stage.kl.where != "none" else None,
        engine=plugins.engine,
        sampling=sampling,
        prompts=PromptStream(data.dataset, data.sampler, stage.batch.prompts, seed, ranks),
        rewards=plugins.rewards,
        manager=plugins.manager,
        estimator=plugins.estimator,
        updater=Updater(
            model=loaded.model,
            stepper=stepper,
            objective=_objective(stage, plugins.loss),
            passes=stage.batch,
            packing=stage.packing,
            longest=sampling.max_new_tokens,
            seed=context.run.seed,
            ranks=ranks,
        ),
        kl_control=kl_controller(stage),
        ranks=ranks,
        keep_samples=ranks.broadcast_object(context.observers.wants("observer_samples")),
    )


def _objective(stage: RlStage, loss: PolicyLoss) -> Objective:
    return Objective(
        loss=loss,
        aggregation=stage.loss.aggregation or loss.traits.aggregation,
        temperature=stage.rollout.sampling.temperature,
        entropy_coef=stage.loss.entropy_coef,
        kl=stage.kl,
    )


def kl_controller(stage: RlStage) -> AdaptiveKL | FixedKL:
    """Adaptive where a target is given."""
    samples = stage.batch.prompts * stage.rollout.sampling.n
    if stage.kl.target is None:
        return FixedKL(stage.kl.coef, samples=samples)
    return AdaptiveKL(stage.kl.coef, target=stage.kl.target, horizon=stage.kl.horizon, samples=samples)


def warn_of_truncated_sampling(sampling: Sampling) -> None:
    """Say that top-p and top-k sample from another distribution than the one that is trained."""
    if sampling.top_p < 1 or sampling.top_k > 0:
        log.warning(
            "rollout.sampling truncates (top_p %g, top_k %d): the trained distribution is the whole one, "
            "so the gradient is biased; top_p 1 and top_k 0 avoid it",
            sampling.top_p,
            sampling.top_k,
        )
