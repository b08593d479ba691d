"""Every metric that a run can write to ``metrics.jsonl``: its unit and what it says.

``<...>`` stands for a name: a reward's label, a phase, a metric of the validation. A key whose quantity does
not exist in a run is absent. Plugins may add metrics of their own. A test holds this against the code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

STEP: Mapping[str, tuple[str, str]] = {
    "stage": ("", "name of the stage"),
    "step": ("", "step of the stage, from 1"),
    "global_step": ("", "step of the whole run, from 1"),
    "lr": ("", "learning rate of the step"),
    "grad_norm": ("", "norm of the whole gradient before it is clipped; mean over the optimiser steps"),
    "tokens_per_s": ("tokens/s", "tokens of the step's sequences (in an rl stage: completions), by its time"),
    "time/step_s": ("s", "wall time of the step, of the slowest rank, as all times are"),
    "time/update_s": ("s", "passes with a gradient, and optimiser steps"),
    "time/validation_s": ("s", "the validation after the step"),
    "update/padding_fraction": ("0..1", "share of the computed tokens that are padding"),
    "update/tokens_per_row": ("tokens", "mean length of a packed row"),
    "update/attention_waste": (
        "1..",
        "pairs of tokens that attention computes for packed rows, by those that count",
    ),
    "update/nonfinite_steps": ("count", "optimiser steps left out because gradient or loss was not finite"),
    "memory/peak_mb": ("MiB", "most that the step took, of the rank that took most"),
    "memory/<phase>/allocated_mb": ("MiB", "what tensors hold at the end of a phase, on a GPU"),
    "memory/<phase>/reserved_mb": ("MiB", "what torch's allocator holds at the end of a phase"),
    "memory/<phase>/device_used_mb": ("MiB", "what the device says is in use at the end of a phase"),
    "memory/<phase>/peak_mb": ("MiB", "most that a phase took, on a GPU"),
    "memory/<phase>/rss_mb": ("MiB", "memory of the process at the end of a phase, on a CPU"),
    "memory/<holder>_mb": ("MiB", "held by weights, optimizer, gradients, engine, or offloaded to the host"),
}
SUPERVISED: Mapping[str, tuple[str, str]] = {
    "loss": ("nats", "mean loss of the step: a token in sft, a pair in reward_model"),
    "accuracy": ("0..1", "reward_model: pairs ranked right; ties count half"),
    "margin": ("", "reward_model: mean score of the chosen answer less that of the rejected one"),
}
RL: Mapping[str, tuple[str, str]] = {
    "reward/mean": ("", "mean reward of everything that was answered, after the manager"),
    "reward/std": ("", "standard deviation of the rewards (population)"),
    "reward/<label>/mean": ("", "mean score of one reward, before the manager"),
    "reward/<label>/<dimension>/mean": ("", "mean of one dimension of a reward that gives several"),
    "reward/<label>/timeouts": ("count", "samples that a reward did not score in time"),
    "reward/<label>/errors": ("count", "samples on which a reward raised"),
    "reward/<label>/seconds_p50": ("s", "median time of a sample, of the slowest rank"),
    "reward/<label>/seconds_p95": ("s", "the time that 95 % of the samples keep below"),
    "reward/<label>/seconds_max": ("s", "the slowest sample"),
    "reward/unscorable_fraction": ("0..1", "samples without a reward; they are masked"),
    "advantage/unscorable": ("0..1", "share of the samples that the estimator left out: no score"),
    "advantage/constant_groups": ("0..1", "share of the groups whose rewards are all equal"),
    "tokens/completion": ("tokens", "mean length of an answer, EOS included"),
    "kl": (
        "nats",
        "distance to the reference by kl.estimator: mean over sequences of their mean over tokens",
    ),
    "kl_coef": ("", "weight of the KL term; moves where it is adaptive"),
    "entropy": ("nats", "mean entropy of the policy, a token, before the update"),
    "loss/policy": ("", "policy loss as aggregated"),
    "loss/entropy": ("", "entropy term of the loss, where it has a weight"),
    "loss/kl": ("", "KL term of the loss, where it is in the loss"),
    "loss/value": ("", "loss of the critic"),
    "clip_fraction": ("0..1", "tokens (or sequences) whose ratio was clipped"),
    "dual_clip_fraction": ("0..1", "tokens with a negative advantage that the dual clip bounded"),
    "negative_clip_fraction": ("0..1", "geo_mean: tokens clipped that have a negative advantage"),
    "truncated_fraction": ("0..1", "dppo losses: tokens whose importance weight was cut at its cap"),
    "approx_kl": ("nats", "estimate of the KL between the policies before and after the updates"),
    "phi_mean": ("", "vespo: mean weight of a sequence"),
    "value/mean": ("", "mean value before the update"),
    "value/return_mean": ("", "mean of what the critic shall learn"),
    "value/explained_variance": ("..1", "share of the returns' variance that the values explain"),
    "value/clip_fraction": ("0..1", "tokens whose value moved further than its clip allows"),
    "value/grad_norm": ("", "norm of the critic's gradient before it is clipped"),
    "value/lr": ("", "learning rate of the critic"),
    "value/nonfinite_steps": ("count", "steps of the critic left out because they were not finite"),
    "rollout/logprob_gap_mean": (
        "nats",
        "mean |difference| of engine's and trainer's log-probability, a token",
    ),
    "rollout/logprob_gap_max": ("nats", "the largest such difference"),
    "rollout/effective_sample_size": (
        "0..1",
        "share of the samples that weights pi_trainer/pi_rollout leave",
    ),
    "rollout/correction_mean": ("", "mean weight of the mismatch correction"),
    "rollout/truncated_fraction": ("0..1", "answers that max_new_tokens cut"),
    "rollout/aborted_fraction": ("0..1", "answers that the engine gave up"),
    "rollout/constant_groups_fraction": ("0..1", "prompts whose answers all have the same reward"),
    "rollout/rank_imbalance": (
        "1..",
        "several processes: trained tokens of the one that has most, by the mean, where they were generated",
    ),
    "rollout/refills": ("count", "dynamic sampling: further rounds of prompts in the step"),
    "rollout/groups_kept": ("count", "dynamic sampling: prompts that were trained on"),
    "rollout/weight_version": ("", "version of the weights that answered"),
    "rollout/tokens_per_s": ("tokens/s", "generated tokens, by the rollout's time"),
    "update/tokens_per_s": ("tokens/s", "trained tokens, prompts included, by the update's time"),
    "update/rank_imbalance": (
        "1..",
        "the same where they are trained on: sequences change places between processes",
    ),
    "update/skipped_fraction": ("0..1", "sequences left out of the passes: their advantage is 0"),
    "time/rollout_s": ("s", "generation"),
    "time/reward_s": ("s", "rewards; they run beside the log-probability passes"),
    "time/reward_wait_s": ("s", "what the step waited for rewards after everything else was done"),
    "time/logprob_s": ("s", "passes of policy and reference without a gradient"),
    "time/critic_s": ("s", "passes and updates of the critic"),
    "time/sync_s": ("s", "new weights on their way to the engine"),
    "alarm/<name>": (
        "0, 1",
        "1 while an alarm rings: entropy, reward_std, length_above, length_below, logprob_gap",
    ),
}
VALIDATION: Mapping[str, tuple[str, str]] = {
    "val/accuracy": ("0..1", "prompts answered right by the first reward; reward_model: pairs ranked right"),
    "val/pass@<k>": ("0..1", "prompts of whose k answers one is right"),
    "val/reward/<label>/mean": ("", "mean score of the further rewards"),
    "val/truncated_fraction": ("0..1", "answers that max_new_tokens cut"),
    "val/loss": ("nats", "reward_model: mean loss of the held-out pairs"),
    "val/margin": ("", "reward_model: mean score of the chosen answer less that of the rejected one"),
    "val/pairs": ("count", "reward_model: pairs that were held out"),
}
GROUPS = {
    "Of every training step": STEP,
    "Of `sft` and `reward_model`": SUPERVISED,
    "Of `rl`": RL,
    "Of a validation": VALIDATION,
}


def described(name: str) -> bool:
    """Whether a metric, or a pattern with ``*`` for what varies, is in the tables."""
    return any(pattern.fullmatch(name) for pattern in _patterns())


@cache
def _patterns() -> tuple[re.Pattern[str], ...]:
    names = [name for group in GROUPS.values() for name in group]
    return tuple(re.compile(re.sub(r"<[^>]*>", r"[^/]+", re.sub(r"([@.])", r"\\\1", name))) for name in names)
