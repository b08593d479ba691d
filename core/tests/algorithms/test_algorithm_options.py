"""Options of the built-in plugins, and what they ask of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from posttune.advantage import plugins as estimators
from posttune.advantage.requirements import unmet
from posttune.errors import UserError
from posttune.loss import plugins as losses
from posttune.testing._batches import random_advantage_batch, random_loss_batch
from posttune.types import Traits
from pydantic import BaseModel, ValidationError

PLUGINS = {
    f"{module.__name__}:{name}": kind
    for module in (estimators, losses)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and isinstance(getattr(kind, "Config", None), type)
}


@pytest.mark.parametrize("kind", PLUGINS.values(), ids=PLUGINS)
def test_every_option_is_described_and_unknown_ones_are_refused(kind: Any) -> None:
    config: type[BaseModel] = kind.Config
    assert all(field.description for field in config.model_fields.values())
    with pytest.raises(ValidationError, match="clip_ration"):
        config(clip_ration=0.1)
    kind(config())  # every option has a default


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (estimators.GAE, {"gamma": 1.5}),
        (estimators.GAE, {"lam": -0.1}),
        (estimators.GAE, {"mask_mode": "skip"}),
        (estimators.GRPO, {"ddof": 2}),
        (estimators.GRPO, {"eps": -1e-6}),
        (estimators.GRPO, {"eps": "1e-6"}),
        (estimators.GRPO, {"singleton": "drop"}),
        (losses.PPOClip, {"dual_clip": 1.0}),
        (losses.PPOClip, {"clip_ratio": -0.1}),
        (losses.SAPO, {"tau_positive": 0}),
        (losses.CISPO, {"bounds": "absolute", "clip_low": 0.2}),
    ],
)
def test_values_out_of_range_are_refused(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        kind.Config(**options)


ESTIMATOR_OPTIONS = [
    (estimators.GAE, {"gamma": 0.5}),
    (estimators.GAE, {"lam": 0.5}),
    (estimators.GAE, {"mask_mode": "plain"}),
    (estimators.GAE, {"mask_mode": "zero"}),
    (estimators.GAE, {"whiten": False}),
    (estimators.GAE, {"ddof": 0}),
    (estimators.GAE, {"eps": 0.1}),
    (estimators.GRPO, {"scale": "batch"}),
    (estimators.GRPO, {"scale": "none"}),
    (estimators.GRPO, {"ddof": 0}),
    (estimators.GRPO, {"eps": 0.1}),
    (estimators.RLOO, {"standardise": True}),
    (estimators.ReinforcePlusPlus, {"gamma": 0.5}),
    (estimators.ReinforcePlusPlus, {"whiten": False}),
    (estimators.ReinforcePlusPlus, {"ddof": 0}),
    (estimators.ReinforcePlusPlusBaseline, {"whiten": False}),
    (estimators.GPG, {"f_norm": 2.0}),
    (estimators.GRPOPassK, {"scale": False}),
    (estimators.GRPOPassK, {"eps": 0.1}),
    (estimators.GDPO, {"weights": {"first": 0.2}}),
    (estimators.GDPO, {"whiten": "sequences"}),
    (estimators.GDPO, {"whiten": "none"}),
    (estimators.GDPO, {"whiten_eps": 0.1}),
]


@pytest.mark.parametrize(("kind", "options"), ESTIMATOR_OPTIONS)
def test_every_option_of_an_estimator_does_something(kind: Any, options: dict[str, Any]) -> None:
    batch = random_advantage_batch(0)
    base = {"lam": 0.5} if "mask_mode" in options else {}  # without any discount a hole's value cancels
    plain, changed = (
        kind(kind.Config(**each)).advantage_estimator_compute(batch=batch).advantages
        for each in (base, base | options)
    )
    assert not torch.equal(plain, changed)


LOSS_OPTIONS = [
    (losses.PPOClip, {"clip_ratio": 0.05}),
    (losses.PPOClip, {"clip_low": 0.05}),
    (losses.PPOClip, {"clip_high": 0.05}),
    (losses.PPOClip, {"dual_clip": 1.1}),
    (losses.GSPO, {"clip_ratio": 0.1}),
    (losses.CISPO, {"clip_low": 0.1}),
    (losses.CISPO, {"clip_high": 0.1}),
    (losses.CISPO, {"bounds": "absolute"}),
    (losses.CISPO, {"level": "sequence"}),
    (losses.SAPO, {"tau_positive": 2.0}),
    (losses.SAPO, {"tau_negative": 2.0}),
    (losses.SAPO, {"level": "sequence"}),
    (losses.GeoMean, {"clip_low": 0.1}),
    (losses.GeoMean, {"clip_high": 0.1}),
    (losses.DPPOTV, {"clip_low": 0.01}),
    (losses.DPPOTV, {"clip_high": 0.01}),
    (losses.DPPOTV, {"ratio_cap": 0.5}),
    (losses.DPPOKL, {"clip_low": 0.001}),
    (losses.DPPOKL, {"clip_high": 0.001}),
    (losses.DPPOKL, {"ratio_cap": 0.5}),
    (losses.LUSPO, {"clip_ratio": 0.1}),
    (losses.LUSPO, {"level": "token"}),
    (losses.VESPO, {"k_positive": 1.0}),
    (losses.VESPO, {"lambda_positive": 1.0}),
    (losses.VESPO, {"k_negative": 1.0}),
    (losses.VESPO, {"lambda_negative": 1.0}),
]


@pytest.mark.parametrize(("kind", "options"), LOSS_OPTIONS)
def test_every_option_of_a_loss_does_something(kind: Any, options: dict[str, Any]) -> None:
    batch = random_loss_batch(0)
    plain, changed = (
        kind(kind.Config(**each)).policy_loss_compute(batch=batch).loss for each in ({}, options)
    )
    assert not torch.equal(plain, changed)


def test_one_clip_ratio_stands_for_both_sides() -> None:
    ppo_clip: Any = losses.PPOClip.Config
    gspo: Any = losses.GSPO.Config
    assert (ppo_clip(clip_ratio=0.15).low, ppo_clip(clip_ratio=0.15).high) == (0.15, 0.15)
    assert (ppo_clip(clip_high=0.28).low, ppo_clip(clip_high=0.28).high) == (0.2, 0.28)
    assert gspo(clip_ratio=0.1).high == 0.1


def test_group_estimators_refuse_one_sample_per_prompt() -> None:
    traits = Traits(needs_groups=True)
    config: Any = estimators.GRPO.Config
    problems = unmet(traits, config(), samples_per_prompt=1, critic=False)
    assert [problem.path for problem in problems] == ["rollout.sampling.n"]
    assert "singleton" in str(problems[0])
    assert unmet(traits, None, samples_per_prompt=1, critic=False)
    assert not unmet(traits, config(), samples_per_prompt=2, critic=False)
    assert not unmet(traits, config(singleton="raw"), samples_per_prompt=1, critic=False)
    assert not unmet(Traits(), None, samples_per_prompt=1, critic=False)


def test_critics_are_asked_for() -> None:
    traits = Traits(needs_critic=True)
    assert [each.path for each in unmet(traits, None, samples_per_prompt=4, critic=False)] == [
        "advantage.name"
    ]
    assert not unmet(traits, None, samples_per_prompt=4, critic=True)


@pytest.mark.parametrize(
    ("kind", "without"), [(estimators.GAE, {"values": None}), (estimators.ReMax, {"baselines": None})]
)
def test_an_estimator_without_what_it_needs_says_so(kind: Any, without: dict[str, Any]) -> None:
    batch = replace(random_advantage_batch(0), **without)
    with pytest.raises(UserError, match=kind.__name__.lower()):
        kind(kind.Config()).advantage_estimator_compute(batch=batch)


def test_gdpo_refuses_weights_of_unknown_dimensions() -> None:
    kind: Any = estimators.GDPO
    plugin = kind(kind.Config(weights={"fluency": 1.0}))
    with pytest.raises(UserError, match=r"fluency.*first, second"):
        plugin.advantage_estimator_compute(batch=random_advantage_batch(0))
