"""Starting configurations with comments, one for each recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from posttune.errors import UserError
from posttune.files import atomic_write_text
from posttune.nearest import nearest

HERE = Path(__file__).parent
CONFIG, SCHEMA = "run.yaml", "posttune.schema.json"
LINK = f"# yaml-language-server: $schema={SCHEMA}\n"


@dataclass(frozen=True)
class Algorithm:
    """What an RL recipe sets: its line of heading, answers to a prompt, and a part of the stage."""

    heading: str
    answers: int
    lines: tuple[str, ...]


CLIP = "loss: {name: ppo_clip, aggregation: token_mean, options: {clip_ratio: 0.2}}"
GROUP = "advantage: {name: grpo}        # an answer against the other answers to the same prompt"
BATCH = "batch: {prompts: 64, mini_batches: 2}   # prompts of a step, and its optimiser steps"
TO_REWARD = "kl: {where: reward, estimator: k1, coef: 0.001}   # distance to the starting model, as a cost"
ALGORITHMS = {
    "grpo": Algorithm(
        "GRPO (arXiv:2402.03300): advantages against the other answers to the same prompt.",
        8,
        (
            GROUP,
            CLIP,
            "kl: {where: loss, estimator: k3, coef: 0.001}   # distance to the starting model",
            BATCH,
        ),
    ),
    "ppo": Algorithm(
        "PPO (arXiv:1707.06347): a critic learns the value of every token.",
        1,
        (
            "advantage: {name: gae, options: {gamma: 1.0, lam: 1.0}}",
            "critic:                      # starts as a copy of the model, with a head of its own",
            "  optimizer: {lr: 1.0e-5}",
            "  warmup_steps: 10           # steps in which it alone learns",
            CLIP,
            TO_REWARD,
            "batch: {prompts: 256, mini_batches: 4}   # prompts of a step, and its optimiser steps",
        ),
    ),
    "dr_grpo": Algorithm(
        "Dr. GRPO (arXiv:2503.20783): no deviation of the group, no length of the answer in the loss.",
        8,
        (
            "advantage: {name: dr_grpo}",
            "loss: {name: ppo_clip, aggregation: seq_mean_token_sum_norm, options: {clip_ratio: 0.2}}",
            BATCH,
        ),
    ),
    "rloo": Algorithm(
        "RLOO (arXiv:2402.14740): the baseline of an answer is the mean of the others.",
        4,
        (
            "advantage: {name: rloo}",
            "loss: {name: ppo_clip, aggregation: seq_mean_token_sum, options: {clip_ratio: 0.2}}",
            TO_REWARD,
            BATCH,
        ),
    ),
    "reinforce_plus_plus": Algorithm(
        "REINFORCE++ (arXiv:2501.03262): advantages normalised over the whole batch.",
        1,
        ("advantage: {name: reinforce_plus_plus}", CLIP, TO_REWARD, BATCH.replace("64", "256")),
    ),
    "dapo": Algorithm(
        "DAPO (arXiv:2503.14476): dynamic sampling, a higher upper clip, a cost of overlong answers.",
        8,
        (
            "reward_manager: {name: overlong, options: {max_length: 512, buffer: 128}}",
            GROUP,
            "dynamic_sampling: {max_refills: 3}   # prompts whose rewards are all equal are replaced",
            "loss: {name: ppo_clip, aggregation: token_mean, options: {clip_low: 0.2, clip_high: 0.28}}",
            BATCH,
        ),
    ),
    "gspo": Algorithm(
        "GSPO (arXiv:2507.18071): the ratio and its clip are of whole answers.",
        8,
        (GROUP, "loss: {name: gspo, options: {clip_low: 3.0e-4, clip_high: 4.0e-4}}", BATCH),
    ),
}
RECIPES = {
    **{name: algorithm.heading for name, algorithm in ALGORITHMS.items()},
    "sft": "Supervised fine-tuning on prompts and responses, or on conversations.",
    "reward_model": "A reward model from pairs of a chosen and a rejected answer.",
    "toy": "A tiny model from nothing learns a reward on the CPU: runs as it is.",
}


def files(recipe: str) -> dict[str, str]:
    """The files of a recipe by name, schema aside. Raises UserError for an unknown one."""
    if recipe not in RECIPES:
        near = nearest(recipe, RECIPES)
        meant = f" (did you mean {near!r}?)" if near else ""
        raise UserError(f"no recipe is called {recipe!r}{meant}", fix=f"one of {', '.join(RECIPES)}")
    if recipe == "toy":
        rows = {"reward.py": _read("toy_reward.py.txt"), "prompts.jsonl": _read("toy_prompts.jsonl")}
        return {CONFIG: LINK + _read("toy.yaml"), **rows}
    if recipe in ALGORITHMS:
        return {CONFIG: LINK + _rl(recipe), "reward.py": _read("reward.py.txt")}
    return {CONFIG: LINK + _read(f"{recipe}.yaml")}


def write(recipe: str, folder: Path, schema: str) -> list[Path]:
    """Write the files of a recipe and the schema into a folder. Raises UserError where one is there."""
    wanted = files(recipe)
    there = [name for name in wanted if (folder / name).exists()]
    if there:
        what = f"{', '.join(there)} {'is' if len(there) == 1 else 'are'} there already; nothing was written"
        raise UserError(what, who=str(folder), fix="name another folder with --in, or move what is there")
    if folder.exists() and not folder.is_dir():
        raise UserError("is a file", who=str(folder), fix="name a folder with --in")
    for name, text in {**wanted, SCHEMA: schema}.items():
        atomic_write_text(folder / name, text)
    return [folder / name for name in (*wanted, SCHEMA)]


def _rl(recipe: str) -> str:
    algorithm = ALGORITHMS[recipe]
    text = _read("rl.yaml")
    for mark, said in {
        "<heading>": algorithm.heading,
        "<name>": recipe,
        "<answers>": str(algorithm.answers),
        "    # <algorithm>": "\n".join(f"    {line}" for line in algorithm.lines),
    }.items():
        text = text.replace(mark, said)
    return text


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
