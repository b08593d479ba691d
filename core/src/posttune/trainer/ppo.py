"""PPO from Python: ``PPOTrainer(actor_model=..., critic_model=..., reward_fn=..., dataset=...)``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttune.config.trainer_options import PPOOptions
from posttune.data.dataset import SampleDataset
from posttune.models.hf_model import HFModel
from posttune.trainer.rl_trainer import RlTrainer


class PPOTrainer(RlTrainer):
    """Proximal policy optimisation with a critic (arXiv:1707.06347) and GAE (arXiv:1506.02438).

    ``config`` is a dict of sections: training, algorithm, rollout, reward, data, observers; see
    ``posttune.config.trainer_options``. The rest is as for ``RlTrainer``.
    """

    name = "ppo"
    Options = PPOOptions

    def __init__(
        self,
        actor_model: HFModel | str | Path,
        critic_model: HFModel | str | Path,
        reward_fn: Any,
        dataset: SampleDataset | str | Path,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            actor_model=actor_model,
            critic_model=critic_model,
            reward_fn=reward_fn,
            dataset=dataset,
            config=config,
        )
