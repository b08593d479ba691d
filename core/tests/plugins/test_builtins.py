"""The plugins of core come in as any other does, and honour the same contract."""

from __future__ import annotations

import math

import pytest
import torch
from posttune.catalog import Catalog
from posttune.config.models import PluginRef
from posttune.facade import build_estimator, build_loss
from posttune.kinds import KINDS
from posttune.pipeline import load_plugin
from posttune.types import AdvantageBatch, LossBatch, Packed

ENTRIES = [entry for entry in Catalog({}).entries() if entry.distribution == "posttune"]

# Two groups of two; one token that is not the policy's, one unscorable sample, one empty response.
PACKED = Packed(
    cu_seqlens=torch.tensor([0, 2, 5, 6, 6], dtype=torch.int32),
    mask=torch.tensor([True, True, True, False, True, True]),
    group=("a", "a", 7, 7),
)
SCORES = torch.tensor([1.0, 0.0, math.nan, 1.0], dtype=torch.float64)


def names(kind: str) -> list[str]:
    return [entry.name for entry in ENTRIES if entry.kind == kind]


def test_every_kind_has_a_built_in() -> None:
    assert {entry.kind for entry in ENTRIES} == set(KINDS)
    assert {entry.status for entry in ENTRIES} == {"ready"}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.kind} {entry.name}")
def test_it_honours_the_contract_and_is_documented(entry: object) -> None:
    plugin = load_plugin(entry.kind, entry.name)  # type: ignore[attr-defined]
    assert plugin.__doc__


@pytest.mark.parametrize("name", names("advantage_estimator"))
def test_its_advantages_pass_the_facade(name: str) -> None:
    batch = AdvantageBatch(
        packed=PACKED,
        token_rewards=torch.zeros(6, dtype=torch.float64),
        scores=SCORES,
        dims={"accuracy": SCORES},
        values=torch.zeros(6),
        baselines=torch.zeros(4, dtype=torch.float64),
        reduce=lambda tensor: tensor,
    )
    result = build_estimator(PluginRef(name=name)).compute(batch)
    assert result.advantages[3] == 0
    assert result.advantages[5] == 0


@pytest.mark.parametrize("name", names("policy_loss"))
def test_its_loss_passes_the_facade(name: str) -> None:
    logp = torch.linspace(-1.0, -0.2, 6).requires_grad_()
    old = torch.full((6,), -0.6)
    advantages = torch.tensor([0.5, 0.5, -1.0, 0.0, -1.0, 0.0])
    result = build_loss(PluginRef(name=name)).compute(LossBatch(PACKED, logp, old, old, advantages))
    result.loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.isfinite().all()
