"""A checkpoint of two models, each with its optimiser: an actor and its critic."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from posttune.checkpoint import dcp, store
from posttune.checkpoint.parts import Part
from posttune.checkpoint.sources import open_source
from posttune.config.models import LoraConfig, ModelConfig
from posttune.errors import CheckpointError
from posttune.models.load import LoadedModel, load_model
from posttune.models.load_scalar import load_critic
from posttune.testing.tiny import tiny_model

LORA = LoraConfig(rank=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "base", layers=1)


class Both:
    """An actor and a critic."""

    def __init__(self, folder: Path, lora: LoraConfig | None = None) -> None:
        self.actor = load_model(ModelConfig(lora=lora), folder, seed=5)
        self.critic = load_critic(ModelConfig(lora=lora), folder, seed=6)
        self.optimizers = [_optimizer(loaded, lr) for loaded, lr in ((self.actor, 3e-3), (self.critic, 1e-2))]

    @property
    def parts(self) -> dict[str, Part]:
        return {"critic": Part(self.critic.model, self.optimizers[1], self.critic.base)}

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            ids = torch.randint(3, 250, (1, 12))
            policy = self.actor.model(input_ids=ids, labels=ids).loss
            value = (self.critic.model(input_ids=ids).logits - 1.0).square().mean()
            (policy + value).backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses += [policy.item(), value.item()]
        return losses

    def save(self, where: Path, parts: Mapping[str, Part] | None = None) -> Path:
        return store.begin(
            where,
            1,
            model=self.actor.model,
            optimizer=self.optimizers[0],
            state={"a": 1},
            tokenizer=self.actor.tokenizer,
            config={},
            base=self.actor.base,
            parts=self.parts if parts is None else parts,
        ).complete()

    def load(self, path: Path) -> dict[str, int]:
        return store.load(path, model=self.actor.model, optimizer=self.optimizers[0], parts=self.parts)


def _optimizer(loaded: LoadedModel, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in loaded.model.parameters() if p.requires_grad], lr=lr)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_both_resume_bit_equal(folder: Path, tmp_path: Path, lora: LoraConfig | None) -> None:
    torch.manual_seed(1)
    first = Both(folder, lora)
    first.train(2)
    path = first.save(tmp_path)
    losses = first.train(3)
    second = Both(folder, lora)
    assert second.load(path) == {"a": 1}
    assert second.train(3) == losses
    assert second.optimizers[1].param_groups[0]["lr"] == 1e-2
    for one, two in ((first.actor, second.actor), (first.critic, second.critic)):
        for left, right in zip(one.model.parameters(), two.model.parameters(), strict=True):
            assert torch.equal(left, right)
    names = dcp.shapes(path / store.TENSORS)
    heads = [name for name in names if name.endswith("score.weight")]
    assert heads
    assert all(name.startswith("part/critic/model/") for name in heads)
    if lora:
        weights = [name for name in names if "/model/" in f"/{name}" and "rng" not in name]
        assert all(".lora_" in name or name in heads for name in weights)


def test_the_main_model_is_read_as_if_it_were_alone(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    both = Both(folder)
    both.train(1)
    path = both.save(tmp_path)
    read = open_source(path).load_model()
    for name, parameter in read.named_parameters():
        assert torch.equal(parameter, both.actor.model.get_parameter(name))


def test_a_checkpoint_of_one_model_has_no_parts(folder: Path, tmp_path: Path) -> None:
    both = Both(folder)
    path = both.save(tmp_path, parts={})
    assert not (path / store.PARTS).exists()
    with pytest.raises(CheckpointError, match="it holds none, the stage has critic"):
        both.load(path)


def test_a_part_that_is_not_asked_for_is_no_resume(folder: Path, tmp_path: Path) -> None:
    both = Both(folder)
    path = both.save(tmp_path)
    with pytest.raises(CheckpointError, match="it holds critic, the stage has none"):
        store.load(path, model=both.actor.model, optimizer=both.optimizers[0])


def test_what_differs_in_a_part_is_named_before_anything_changes(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    both = Both(folder)
    both.train(1)
    path = both.save(tmp_path / "run")
    other = Both(folder)
    other.critic = load_critic(ModelConfig(), tiny_model(tmp_path / "wide", layers=2), seed=0)
    other.optimizers[1] = _optimizer(other.critic, 1.0)
    before = [p.detach().clone() for p in other.actor.model.parameters()]
    with pytest.raises(CheckpointError, match=r"critic: the model has 9 tensors that the checkpoint has not"):
        other.load(path)
    assert all(torch.equal(a, b) for a, b in zip(before, other.actor.model.parameters(), strict=True))
    other.critic = load_critic(ModelConfig(lora=LORA), folder, seed=0)
    with pytest.raises(CheckpointError, match=r"critic: its adapters are None"):
        other.load(path)


def test_a_damaged_description_is_an_error(folder: Path, tmp_path: Path) -> None:
    both = Both(folder)
    path = both.save(tmp_path)
    size = len((path / store.PARTS).read_text())
    (path / store.PARTS).write_text(json.dumps({"critic": {}}).ljust(size))
    with pytest.raises(CheckpointError, match=r"parts\.json is unusable"):
        both.load(path)
