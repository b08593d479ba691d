"""The RL stage: everything that its steps need, made ready."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass

from posttune.config.models import RlStage
from posttune.data.tokenize import tokenizer_fingerprint
from posttune.errors import UserError
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
from posttune.memory.apply import check_idle, settle_optimizer
from posttune.memory.ledger import LEDGER
from posttune.models.load import LoadedModel, Reference
from posttune.rollout.requests import make_sampling
from posttune.run.stages import StageContext, StageResult
from posttune.trainer._alarms import Alarms, rules_of
from posttune.trainer._collect import Collector
from posttune.trainer._critic import PART, Critic
from posttune.trainer._inputs import (
    Data,
    check_model_length,
    load_data,
    load_policy,
    load_stage_critic,
    longest_prompt,
)
from posttune.trainer._passes import Passes
from posttune.trainer._prompts import PromptStream
from posttune.trainer._update import Objective, Updater
from posttune.trainer.checks import check_stage
from posttune.trainer.optimizer import make_stepper
from posttune.trainer.rl_step import RlWork
from posttune.trainer.stage import Setup, train
from posttune.trainer.validation import longest_answered, make_validation, rollout_context
from posttune.types import BackendInfo, Sampling

log = logging.getLogger("posttune.trainer")


def run_rl(stage: RlStage, context: StageContext) -> StageResult:
    """Train on completions of the model itself; see ``RlWork.step`` for what a step does."""
    check_stage(context.name, stage, world=context.ranks.data_world)
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
    def of(cls, stage: RlStage, rewards: Rewards | None = None) -> Plugins:
        """Compose them; a script may have made ``rewards``. Raises what ``posttune.facade`` raises."""
        return cls(
            engine=build_rollout(stage.rollout),
            rewards=rewards or build_rewards(stage.rewards),
            manager=build_manager(stage.reward_manager),
            estimator=build_estimator(stage.advantage),
            loss=build_loss(stage.loss),
        )


def prepare(stage: RlStage, context: StageContext, stack: ExitStack, rewards: Rewards | None = None) -> Setup:
    """Compose the plugins, load the model and the data, start the engine. ``stack`` stops it."""
    plugins = Plugins.of(stage, rewards)
    loaded, reference = load_policy(stage, context)
    data = load_data(stage.data, loaded, context)
    longest = longest_prompt(data, stage.max_prompt_length) + stage.rollout.sampling.max_new_tokens
    check_model_length(loaded, longest, "rollout.sampling.max_new_tokens")
    longest = max(longest, longest_answered(stage.evaluate, context, loaded))
    stack.callback(plugins.rewards.close)
    engine = stack.enter_context(plugins.engine)
    with LEDGER.starting_engine(context.ranks.device):
        info = engine.start(rollout_context(stage.rollout, context, loaded, longest))
    check_logprobs(stage, info)
    check_idle(stage, info)
    validation = make_validation(stage.evaluate, context, loaded, stack, engine)
    work = _work(stage, context, plugins, loaded, reference, data)
    return Setup(
        config=stage,
        loaded=loaded,
        optimizer=work.updater.stepper.optimizer,
        work=work,
        total_steps=work.total_steps,
        data_fingerprint=data.dataset.fingerprint,
        validation=validation,
        parts={} if work.critic is None else {PART: work.critic.part},
    )


def _work(
    stage: RlStage,
    context: StageContext,
    plugins: Plugins,
    loaded: LoadedModel,
    reference: Reference | None,
    data: Data,
) -> RlWork:
    ranks, total_steps = context.ranks, data.steps(stage, stage.batch.prompts)
    passes = Passes.of(stage.batch, stage.rollout.sampling.max_new_tokens, context.run.seed, ranks)
    stepper = make_stepper(loaded.model, stage.optimizer, ranks)
    settle_optimizer("policy", loaded.model, stepper.optimizer, stage.memory, ranks.device)
    return RlWork(
        config=stage,
        total_steps=total_steps,
        loaded=loaded,
        reference=reference,
        collector=_collector(stage, context, plugins, loaded, data),
        estimator=plugins.estimator,
        updater=Updater(
            model=loaded.model,
            stepper=stepper,
            objective=_objective(stage, plugins.loss),
            passes=passes,
            packing=stage.packing,
            ranks=ranks,
        ),
        critic=_critic(stage, context, loaded, passes, total_steps),
        kl_control=kl_controller(stage),
        alarms=Alarms(rules_of(stage), speaks=ranks.main),
        ranks=ranks,
        keep_samples=ranks.broadcast_object(context.observers.wants("observer_samples")),
    )


def _collector(
    stage: RlStage, context: StageContext, plugins: Plugins, loaded: LoadedModel, data: Data
) -> Collector:
    asked, dynamic = stage.rollout.sampling, stage.dynamic_sampling
    sampling = make_sampling(asked, loaded.eos_ids)
    warn_of_truncated_sampling(sampling)
    seed = context.run.seed if asked.seed is None else asked.seed
    return Collector(
        engine=plugins.engine,
        tokenizer=loaded.tokenizer,
        sampling=sampling,
        stream=PromptStream(data.dataset, data.sampler, stage.batch.prompts, seed, context.ranks),
        rewards=plugins.rewards,
        manager=plugins.manager,
        ranks=context.ranks,
        greedy=plugins.estimator.traits.needs_greedy_baseline,
        drop=stage.batch.drop_constant_groups or dynamic is not None,
        refills=0 if dynamic is None else dynamic.max_refills,
    )


def _critic(
    stage: RlStage, context: StageContext, policy: LoadedModel, passes: Passes, total_steps: int
) -> Critic | None:
    """The stage's critic. Raises UserError where it reads other tokens than the policy writes."""
    config = stage.critic
    if config is None:
        return None
    loaded = load_stage_critic(stage, config, context)
    if tokenizer_fingerprint(loaded.tokenizer) != tokenizer_fingerprint(policy.tokenizer):
        fix = "take one with the tokenizer of the policy, or leave critic.model out"
        raise UserError("its tokenizer is not the policy's", who="critic.model", fix=fix)
    stepper = make_stepper(loaded.model, config.optimizer, context.ranks)
    settle_optimizer(PART, loaded.model, stepper.optimizer, stage.memory, context.ranks.device)
    return Critic(config, loaded, stepper, passes.for_critic(config), stage.packing, total_steps)


def _objective(stage: RlStage, loss: PolicyLoss) -> Objective:
    return Objective(
        loss=loss,
        aggregation=stage.loss.aggregation or loss.traits.aggregation,
        temperature=stage.rollout.sampling.temperature,
        entropy_coef=stage.loss.entropy_coef,
        kl=stage.kl,
        mismatch=stage.mismatch,
    )


def kl_controller(stage: RlStage) -> AdaptiveKL | FixedKL:
    """Adaptive where a target is given."""
    samples = stage.batch.prompts * stage.rollout.sampling.n
    if stage.kl.target is None:
        return FixedKL(stage.kl.coef, samples=samples)
    return AdaptiveKL(stage.kl.coef, target=stage.kl.target, horizon=stage.kl.horizon, samples=samples)


def check_logprobs(stage: RlStage, info: BackendInfo) -> None:
    """Raise UserError where the engine tells no log-probabilities, and they are asked for."""
    mismatch = stage.mismatch
    if info.logprobs == "none" and (mismatch.correction != "none" or mismatch.alarm is not None):
        raise UserError(
            f"the rollout backend {info.name} gives no log-probabilities to compare with",
            who="mismatch",
            fix="remove mismatch, or choose a backend that gives them",
        )


def warn_of_truncated_sampling(sampling: Sampling) -> None:
    """Say that top-p and top-k sample from another distribution than the one that is trained."""
    if sampling.top_p < 1 or sampling.top_k > 0:
        log.warning(
            "rollout.sampling truncates (top_p %g, top_k %d): the trained distribution is the whole one, "
            "so the gradient is biased; top_p 1 and top_k 0 avoid it",
            sampling.top_p,
            sampling.top_k,
        )
