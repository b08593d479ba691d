"""Short GRPO runs for the rollout suite: through the trainer, with nothing but the engine's name changed."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttune.data.conversion import ConvertRequest, convert
from posttune.testing._rollout_bench import ENDS, write_model

if TYPE_CHECKING:
    from posttune.testing._rollout_base import RolloutChecks

PROMPTS = 8
LONGEST = 12


def make_task(folder: Path) -> None:
    """``model``, which ends about one answer in seven tokens, and ``data``, once."""
    if (folder / "data").exists():
        return
    write_model(folder / "model", tie=False)
    settings = folder / "model" / "generation_config.json"
    fields = json.loads(settings.read_text("utf-8")) if settings.exists() else {}
    settings.write_text(json.dumps(fields | {"eos_token_id": sorted(ENDS)}), "utf-8")
    rows = [{"prompt": f"{n}+{n + 1}=", "response": str(2 * n + 1)} for n in range(PROMPTS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    convert(ConvertRequest([folder / "rows.jsonl"], folder / "data", tokenizer=folder / "model"))


def run(suite: RolloutChecks, folder: Path, *, lr: float, steps: int, **sampling: Any) -> Run:
    """GRPO with the reward "longer is better", one step a pass over the prompts."""
    from posttune import GRPOTrainer, HFModel

    make_task(folder)
    result = Run()
    trainer = GRPOTrainer(
        model=HFModel(folder / "model", dtype=suite.dtype),
        reward_fn=result.longer,
        dataset=folder / "data",
        config={
            "training": {"batch_size": PROMPTS, "lr": lr, "device": suite.device},
            "algorithm": {"kl_where": "none"},
            "rollout": {
                "name": suite.backend,
                "options": dict(suite.options),
                "max_new_tokens": LONGEST,
                "max_sequences": suite.max_sequences,
                "memory_share": suite.memory_share,
            }
            | sampling,
            "data": {"shuffle": False},
            "observers": [],
        },
    )
    with trainer:
        for _ in range(steps):
            result.metrics.append(trainer.train_epoch())
    return result


class Run:
    """What a run showed: its metrics by step, and the answers to each prompt in the order they came."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.answers: dict[str, list[str]] = defaultdict(list)

    def longer(self, prompt: str, response: str) -> float:
        """More bytes are better."""
        self.answers[prompt].append(response)
        return len(response.encode()) / LONGEST

    def lengths(self) -> list[float]:
        """Mean tokens of an answer, by step."""
        return [line["tokens/completion"] for line in self.metrics]
