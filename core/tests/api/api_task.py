"""A toy task for the Python API: a tiny model, additions, and trainers on them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttune import DataConverter, HFModel, PPOTrainer, SampleDataset
from posttune.testing.tiny import tiny_model

ROWS = 10
VOLATILE = ("time/", "memory/")


def make_task(folder: Path, rows: int = ROWS, **model: Any) -> None:
    """``model``, ``raw.jsonl`` and ``data`` (tokenised) in ``folder``."""
    tiny_model(folder / "model", **({"hidden": 32, "layers": 1, "heads": 2, "head_dim": 16} | model))
    lines = [json.dumps({"question": f"{n}+1=", "answer": f"#### {n + 1}", "level": n}) for n in range(rows)]
    (folder / "raw.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    convert(folder)


def convert(folder: Path, to: str = "data") -> Path:
    """Convert ``raw.jsonl``; the dataset's folder."""
    converter = DataConverter(folder / "raw.jsonl", folder / to, folder / "model")
    converter.convert(prompt_key="question", response_key="answer")
    return folder / to


def letters(prompt: str, response: str) -> float:
    """More lower-case letters are better."""
    return sum(character.islower() for character in response) / 8


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` laid over ``base``, section by section."""
    return {name: {**base.get(name, {}), **over.get(name, {})} for name in {**base, **over}}


def ppo(task: Path, output: Path | None = None, *, reward_fn: Any = letters, **config: Any) -> PPOTrainer:
    """A trainer on the task: 10 prompts, 4 a step, so that a pass has 3 steps."""
    base = {
        "training": {"batch_size": 4, "lr": 1e-3, "output_dir": None if output is None else str(output)},
        "rollout": {"max_new_tokens": 6},
    }
    return PPOTrainer(
        actor_model=HFModel(task / "model"),
        critic_model=HFModel(task / "model", is_critic=True),
        reward_fn=reward_fn,
        dataset=SampleDataset(task / "data"),
        config={**merged(base, {k: v for k, v in config.items() if k != "observers"}), "observers": []}
        | ({"observers": config["observers"]} if "observers" in config else {}),
    )


def comparable(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics without what differs from run to run."""
    return {
        name: value
        for name, value in metrics.items()
        if not name.startswith(VOLATILE) and "tokens_per_s" not in name and "/seconds_" not in name
    }


def weights(trainer: PPOTrainer) -> dict[str, Any]:
    """A copy of the policy's present weights."""
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
