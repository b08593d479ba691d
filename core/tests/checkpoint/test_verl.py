"""verl's shards, of every placement, become the model that they were cut from."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from posttune.checkpoint._export import export_model
from posttune.checkpoint.shards import assemble, box_of
from posttune.checkpoint.sources import open_source
from posttune.checkpoint.verl import VerlFolder
from posttune.cli.main import main
from posttune.config.models import LoraConfig, ModelConfig, PluginRef
from posttune.errors import CheckpointError, ModelError
from posttune.models.load import load_model
from posttune.testing.tiny import tiny_model
from torch.distributed.tensor import Replicate, Shard
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from verl_folders import job, save_shards

IDS = torch.arange(3, 60)[None]
KINDS = {
    2: ("shard0", "shard1", "replicate"),
    4: ("shard0", "shard1", "hsdp", "both", "twice", "strided"),
}
NORM = "model.norm.weight"


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found.float()


def state(folder: Path) -> dict[str, torch.Tensor]:
    """As verl has it: every name of the module, a tied one twice."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def add_files(folder: Path, base: Path) -> None:
    """``huggingface/`` with config and tokenizer, and the files that are not of interest."""
    shutil.copytree(base, folder / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "optim_world_size_4_rank_0.pt").write_bytes(b"not for us")
    (folder / "extra_state_world_size_4_rank_0.pt").write_bytes(b"not for us")
    (folder / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 4}')


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """33 wide, so that no dimension is a multiple of the processes."""
    return tiny_model(tmp_path_factory.mktemp("verl") / "base", layers=1, heads=1, hidden=33, head_dim=34)


@pytest.fixture(scope="module")
def folders(base: Path) -> Path:
    """A folder for each way to cut, by 2 and by 4 processes."""
    root = base.parent
    torch.save(state(base), root / "weights.pt")
    for world, kinds in KINDS.items():
        jobs = [job(root / f"{kind}-{world}", root / "weights.pt", kind, (NORM,)) for kind in kinds]
        save_shards(jobs, world)
        for kind in kinds:
            add_files(root / f"{kind}-{world}", base)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"{kind}-{world}" for world, kinds in KINDS.items() for kind in kinds])
def test_every_placement(folders: Path, tmp_path: Path, name: str) -> None:
    source = open_source(folders / name)
    assert source.kind == "verl"
    expected = state(folders / "base")
    found = dict(source.tensors())
    assert {key: tuple(tensor.shape) for key, tensor in found.items()} == {
        key: tuple(tensor.shape) for key, tensor in expected.items()
    }
    assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())
    exported = export_model(source, tmp_path / "out")
    assert exported.verification.max_abs_logit_difference == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    original = AutoModelForCausalLM.from_pretrained(folders / "base", dtype=torch.float32)
    assert torch.equal(logits(model), logits(original))
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert (tmp_path / "out" / "generation_config.json").is_file()


@pytest.mark.slow
def test_a_step_folder_and_the_folder_of_steps(folders: Path, tmp_path: Path) -> None:
    for step in (9, 10):
        shutil.copytree(folders / "shard0-2", tmp_path / f"global_step_{step}" / "actor")
    (tmp_path / "global_step_11").mkdir()
    for path in (tmp_path, tmp_path / "global_step_10", tmp_path / "global_step_10" / "actor"):
        assert open_source(path).path == (tmp_path / "global_step_10" / "actor").resolve()
    with pytest.raises(ModelError):
        open_source(tmp_path, part="critic")


@pytest.mark.slow
def test_missing_and_damaged_files(
    folders: Path, base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    shutil.copytree(folders / "shard0-2", missing)
    (missing / "model_world_size_2_rank_1.pt").unlink()
    assert main(["export", str(missing), "--to", str(tmp_path / "out")]) == 1
    assert "1 of its 2 ranks are missing, the first is model_world_size_2_rank_1.pt" in capfd.readouterr().err
    cut = tmp_path / "cut"
    shutil.copytree(folders / "shard0-2", cut)
    shard = cut / "model_world_size_2_rank_0.pt"
    shard.write_bytes(shard.read_bytes()[:-2000])
    assert main(["export", str(cut), "--to", str(tmp_path / "out")]) == 1
    assert "model_world_size_2_rank_0.pt: cannot be read" in capfd.readouterr().err
    bare = tmp_path / "bare"
    shutil.copytree(folders / "shard0-2", bare)
    shutil.rmtree(bare / "huggingface")
    assert main(["export", str(bare), "--to", str(tmp_path / "out")]) == 2
    assert "--base DIR" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["export", str(bare), "--to", str(tmp_path / "out"), "--base", str(base), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["max_abs_logit_difference"] == 0


def one_process(folder: Path, base: Path, weights: dict[str, Any]) -> Path:
    """World size 1: plain tensors."""
    folder.mkdir(parents=True)
    torch.save(weights, folder / "model_world_size_1_rank_0.pt")
    add_files(folder, base)
    return folder


def test_world_size_1(base: Path, tmp_path: Path) -> None:
    folder = one_process(tmp_path / "actor", base, state(base))
    exported = export_model(open_source(folder), tmp_path / "out", dtype="bfloat16")
    assert exported.report.dtype == "bfloat16"
    assert "put together from 1 shards of verl" in (tmp_path / "out" / "README.md").read_text()


def test_padding_of_the_vocabulary_is_removed(base: Path, tmp_path: Path) -> None:
    weights = state(base)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.cat([weights[name], torch.full((5, 33), 7.0)])
    export_model(open_source(one_process(tmp_path / "actor", base, weights)), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert model.lm_head.weight.shape == (259, 33)
    assert torch.equal(logits(model), logits(AutoModelForCausalLM.from_pretrained(base)))


@pytest.mark.parametrize("equal", [True, False])
def test_tied_configuration(tmp_path: Path, equal: bool) -> None:
    base = tiny_model(tmp_path / "base", layers=1, tie=True)
    weights = state(base)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone() + (0.0 if equal else 0.1)
    source = open_source(one_process(tmp_path / "actor", base, weights))
    if equal:
        export_model(source, tmp_path / "out")
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.tie_word_embeddings
    else:
        with pytest.raises(ModelError, match=r"tie_word_embeddings is True, but lm_head.weight is not"):
            export_model(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_weights_of_another_model(base: Path, tmp_path: Path, change: str) -> None:
    weights = state(base)
    if change == "missing":
        del weights[NORM]
    elif change == "extra":
        weights["v_head.summary.weight"] = torch.zeros(1, 33)
    else:
        weights[NORM] = torch.ones(40)
    source = open_source(one_process(tmp_path / "actor", base, weights))
    with pytest.raises(ModelError, match=r"the first is (model\.norm|v_head)|norm\.weight|cannot be made"):
        export_model(source, tmp_path / "out")


def test_a_critic(base: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = AutoModelForTokenClassification.from_pretrained(base, num_labels=1)
    folder = one_process(tmp_path / "global_step_5" / "critic", base, dict(made.state_dict()))
    one_process(tmp_path / "global_step_5" / "actor", base, state(base))
    source = open_source(tmp_path / "global_step_5", part="critic")
    assert source.path == folder.resolve()
    export_model(source, tmp_path / "out")
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert torch.equal(logits(critic), logits(made.eval()))
    assert open_source(tmp_path / "global_step_5").path == (tmp_path / "global_step_5" / "actor").resolve()


@pytest.mark.parametrize("alpha", [None, 0, 32])
def test_adapters(base: Path, tmp_path: Path, alpha: int | None) -> None:
    lora = LoraConfig(rank=2, alpha=32.0, target_modules=["q_proj", "o_proj"])
    loaded = load_model(ModelConfig(path=str(base), lora=lora), base, seed=1)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    folder = one_process(tmp_path / "actor", base, dict(loaded.model.state_dict()))
    if alpha is not None:
        (folder / "lora_train_meta.json").write_text(json.dumps({"r": 2, "lora_alpha": alpha}))
    if not alpha:
        with pytest.raises(CheckpointError, match="with which alpha"):
            export_model(open_source(folder), tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return
    export_model(open_source(folder), tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), logits(loaded.model), rtol=0, atol=1e-5)
    assert not any("lora" in name for name in merged.state_dict())
    adapter = PluginRef(name="lora_adapter")
    export_model(open_source(folder, base=base), tmp_path / "adapter", exporter=adapter)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["lora_alpha"] == 32


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.marker}",))


def test_a_hostile_shard_executes_nothing(base: Path, tmp_path: Path) -> None:
    weights = {**state(base), "payload": Hostile(tmp_path / "marker")}
    folder = one_process(tmp_path / "actor", base, weights)
    with pytest.raises(CheckpointError, match="is refused"):
        VerlFolder(folder).load_model()
    assert not (tmp_path / "marker").exists()


def test_entries_that_are_no_tensors(base: Path, tmp_path: Path) -> None:
    folder = one_process(tmp_path / "actor", base, {**state(base), "step": 3})
    with pytest.raises(CheckpointError, match="'step' is no tensor"):
        open_source(folder).load_model()


def test_replicas_that_differ(tmp_path: Path) -> None:
    pieces = {0: torch.tensor([1.0, float("nan")]), 1: torch.tensor([1.0, float("nan")])}
    assert torch.isnan(assemble("x", "buffer", pieces)[1])
    with pytest.raises(CheckpointError, match=r"rank 1 has other values"):
        assemble("x", "buffer", {0: torch.zeros(2), 1: torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"another shape or type on some rank: \[2\] float32, \[3\]"):
        assemble("x", "buffer", {0: torch.zeros(2), 1: torch.zeros(3)})
    assert assemble("x", "count", {0: torch.tensor(3), 1: torch.tensor(3)}).shape == ()


def test_where_pieces_lie() -> None:
    boxes = [box_of((7, 10), (4,), (rank,), [Shard(0)]) for rank in range(4)]
    assert [box[0] for box in boxes] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert box_of((5,), (4,), (3,), [Shard(0)]) == ((5, 5),)  # two each: nothing is left for the last
    assert box_of((7, 10), (2, 2), (1, 0), [Replicate(), Shard(1)]) == ((0, 7), (0, 5))
    assert box_of((), (2,), (1,), [Replicate()]) == ()
