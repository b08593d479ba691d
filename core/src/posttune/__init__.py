"""posttune: post-train language models with everything that people swap as a plugin.

Importing this package imports no torch; the names below load on first use (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from posttune._version import API, __version__

if TYPE_CHECKING:
    from posttune.data.conversion import DataConverter
    from posttune.data.dataset import SampleDataset
    from posttune.hookspecs import hookimpl
    from posttune.models.hf_model import HFModel
    from posttune.reward.base import BaseRewardFunction
    from posttune.trainer.grpo import GRPOTrainer
    from posttune.trainer.ppo import PPOTrainer

_LAZY = {
    "BaseRewardFunction": "posttune.reward.base",
    "DataConverter": "posttune.data.conversion",
    "GRPOTrainer": "posttune.trainer.grpo",
    "HFModel": "posttune.models.hf_model",
    "PPOTrainer": "posttune.trainer.ppo",
    "SampleDataset": "posttune.data.dataset",
    "hookimpl": "posttune.hookspecs",
}

__all__ = [
    "API",
    "BaseRewardFunction",
    "DataConverter",
    "GRPOTrainer",
    "HFModel",
    "PPOTrainer",
    "SampleDataset",
    "__version__",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
