"""What a stage's memory options must fulfil together. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from posttune.config.models import ModelConfig, RewardModelStage, RlStage, SftStage
from posttune.errors import Problem


def memory_problems(name: str, stage: SftStage | RewardModelStage | RlStage) -> Iterator[Problem]:
    """What is asked to wait on the host and is not there, or never idle."""
    where, away = f"stages.{name}.memory.offload", stage.memory.offload
    if not isinstance(stage, RlStage):
        if away:
            message = (
                "the models of this stage are never idle; optimizer.offload keeps the moments on the host"
            )
            yield Problem(where, message)
        return
    if "critic" in away and stage.critic is None:
        yield Problem(where, "the stage has no critic")
    if "reference" in away and stage.kl.where == "none":
        yield Problem(where, "the stage has no reference: kl.where is none")
    elif "reference" in away and isinstance(stage.model, ModelConfig) and stage.model.lora is not None:
        yield Problem(where, "with LoRA the reference is the policy with its adapters off; take it out")
    if "optimizer" in away and _all_on_host(stage):
        yield Problem(where, "the moments are on the host already, by optimizer.offload; take optimizer out")


def _all_on_host(stage: RlStage) -> bool:
    return stage.optimizer.offload and (stage.critic is None or stage.critic.optimizer.offload)
