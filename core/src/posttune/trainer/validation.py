"""An evaluation in the middle of training, and the early end that it may bring."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from posttune.config.models import RolloutConfig, ValidationConfig
from posttune.data.dataset import SampleDataset
from posttune.distributed.ranks import Ranks
from posttune.evaluate.evaluate import evaluate
from posttune.facade import Rewards, RolloutEngine, build_rewards, build_rollout
from posttune.models.load import LoadedModel
from posttune.rollout.requests import make_sampling
from posttune.run.stages import StageContext
from posttune.trainer._inputs import Data, check_model_length, load_data, longest_prompt
from posttune.types import Resources, RolloutContext, Sampling


@dataclass(frozen=True)
class Validation:
    """Evaluates the policy every so many steps. Every rank answers its share."""

    config: ValidationConfig
    engine: RolloutEngine
    loaded: LoadedModel
    dataset: SampleDataset
    limit: int
    rewards: Rewards
    sampling: Sampling
    seed: int
    ranks: Ranks

    def due(self, step: int) -> bool:
        """Whether an evaluation follows step ``step`` (from 1)."""
        return step % self.config.every == 0

    def run(self) -> dict[str, float]:
        """``val/*`` of the weights that the engine holds."""
        began = time.perf_counter()
        result = evaluate(
            self.engine,
            self.loaded.tokenizer,
            self.dataset,
            self.rewards,
            self.sampling,
            self.limit,
            seed=self.seed,
            ranks=self.ranks,
        )
        return result.metrics() | {"time/validation_s": time.perf_counter() - began}

    def reached(self, metrics: Mapping[str, float]) -> bool:
        """Whether the stage may end."""
        stop = self.config.stop
        return stop is not None and metrics.get(stop.metric, float("-inf")) >= stop.at_least


def make_validation(
    config: ValidationConfig | None,
    context: StageContext,
    loaded: LoadedModel,
    stack: ExitStack,
    engine: RolloutEngine | None = None,
) -> Validation | None:
    """What a stage asks for; with an engine of its own where the stage has none."""
    if config is None:
        return None
    data, longest = _data(config, context, loaded)
    if engine is None:
        engine = stack.enter_context(build_rollout(RolloutConfig()))
        engine.start(rollout_context(RolloutConfig(), context, loaded, longest))
    seed = config.sampling.seed
    rewards = build_rewards(config.rewards)
    stack.callback(rewards.close)
    return Validation(
        config=config,
        engine=engine,
        loaded=loaded,
        dataset=data.dataset,
        limit=data.sampler.size,
        rewards=rewards,
        sampling=make_sampling(config.sampling, loaded.eos_ids, logprobs=False),
        seed=context.run.seed if seed is None else seed,
        ranks=context.ranks,
    )


def longest_answered(config: ValidationConfig | None, context: StageContext, loaded: LoadedModel) -> int:
    """Tokens of the longest prompt and completion that a validation makes."""
    return 0 if config is None else _data(config, context, loaded)[1]


def _data(config: ValidationConfig, context: StageContext, loaded: LoadedModel) -> tuple[Data, int]:
    data = load_data(config.data, loaded, context, name=f"{context.name}-validation")
    longest = longest_prompt(data) + config.sampling.max_new_tokens
    check_model_length(loaded, longest, "evaluate.sampling.max_new_tokens")
    return data, longest


def rollout_context(
    rollout: RolloutConfig, context: StageContext, loaded: LoadedModel, max_length: int
) -> RolloutContext:
    """What an engine beside the trainer is told at its start."""
    asked = rollout.resources
    return RolloutContext(
        model_path=loaded.source,
        tokenizer=loaded.tokenizer,
        dtype=str(next(loaded.model.parameters()).dtype).removeprefix("torch."),
        device=str(context.ranks.device),
        seed=context.run.seed,
        max_length=max_length,
        resources=Resources(asked.memory_share, asked.tensor_parallel_size, asked.max_sequences),
        live_model=loaded.model,
    )
