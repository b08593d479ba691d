"""Checkpoints and exports of a model on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from posttune.checkpoint import store
from posttune.checkpoint._export import export_model
from posttune.checkpoint.sources import LiveModel, open_source
from posttune.config.models import LoraConfig, ModelConfig
from posttune.models.load import LoadedModel, load_model
from posttune.testing.tiny import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def begin(folder: Path, dtype: Any, lora: LoraConfig | None) -> tuple[LoadedModel, torch.optim.AdamW]:
    loaded = load_model(ModelConfig(path=str(folder), dtype=dtype, lora=lora), folder, seed=5, device="cuda")
    loaded.model.train()
    trained = [parameter for parameter in loaded.model.parameters() if parameter.requires_grad]
    return loaded, torch.optim.AdamW(trained, lr=3e-3, fused=True)


def train(loaded: LoadedModel, optimizer: torch.optim.AdamW, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        ids = torch.randint(3, 250, (2, 12), device="cuda")
        loss = loaded.model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, dropout=0.2)], ids=["full", "lora"])
def test_resume_and_export(tmp_path: Path, dtype: str, lora: LoraConfig | None) -> None:
    folder = tiny_model(tmp_path / "base", tie=True)
    torch.manual_seed(1)
    loaded, optimizer = begin(folder, dtype, lora)
    train(loaded, optimizer, 3)
    path = store.begin(
        tmp_path / "run",
        3,
        model=loaded.model,
        optimizer=optimizer,
        state={},
        tokenizer=loaded.tokenizer,
        config={},
        base=loaded.base,
    ).complete()
    expected = train(loaded, optimizer, 2)
    torch.manual_seed(99)
    again, second = begin(folder, dtype, lora)
    store.load(path, model=again.model, optimizer=second)
    assert {state["step"].device.type for state in second.state.values()} == {"cuda"}
    torch.testing.assert_close(train(again, second, 2), expected, rtol=1e-3, atol=1e-3)
    exported = export_model(LiveModel(loaded.model, loaded.tokenizer), tmp_path / "live")
    assert exported.report.dtype == dtype
    assert exported.verification.passed
    assert loaded.model.device.type == "cuda"
    assert export_model(open_source(path), tmp_path / "stored").verification.passed
