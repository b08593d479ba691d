"""GRPO and its kin from Python: ``GRPOTrainer(model=..., reward_fn=..., dataset=...)``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttune.config.trainer_options import GRPOOptions
from posttune.data.dataset import SampleDataset
from posttune.models.hf_model import HFModel
from posttune.trainer.rl_trainer import RlTrainer


class GRPOTrainer(RlTrainer):
    """Group-relative policy optimisation (arXiv:2402.03300).

    ``config["algorithm"]["estimator"]`` takes any other estimator without a critic (rloo, dr_grpo, ...).
    The rest is as for ``RlTrainer``.
    """

    name = "grpo"
    Options = GRPOOptions

    def __init__(
        self,
        model: HFModel | str | Path,
        reward_fn: Any,
        dataset: SampleDataset | str | Path,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            actor_model=model, critic_model=None, reward_fn=reward_fn, dataset=dataset, config=config
        )
