"""What a plan says is what is measured, and what it can be told without running anything."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_toy as toy
from optimizer_libraries import need
from posttune.cli.main import main
from posttune.config.load import dump_yaml
from posttune.config.models import LoraConfig, ModelConfig, RunConfig
from posttune.errors import ModelError, UserError
from posttune.models.load import load_model, new_model
from posttune.models.load_scalar import load_critic
from posttune.models.tokenizer import byte_tokenizer
from posttune.plan.estimate import PhasePlan, Setting, plan_run
from posttune.plan.shapes import _counted, model_shape

MIB = 2**20
SEVEN_B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


def plan(folder: Path, stage: dict[str, Any], **setting: Any) -> Any:
    run = RunConfig.model_validate({"output": str(folder), "stages": {stage["kind"]: stage}})
    return plan_run(run, Setting(**setting))[0]


def by_name(found: Any) -> dict[str, PhasePlan]:
    return {phase.name: phase for phase in found.phases}


def test_the_shape_of_7b_is_known_without_its_weights() -> None:
    shape = model_shape(ModelConfig(init=SEVEN_B, tokenizer="bytes", dtype="bfloat16"), None)
    assert shape.weights == 7_615_616_512  # as Qwen2.5-7B's card has it: 7.61 B
    assert shape.key_values == 28 * 2 * 4 * 128
    critic = model_shape(ModelConfig(init=SEVEN_B, tokenizer="bytes"), None, scalar=True)
    assert critic.weights == shape.weights - 152064 * 3584 + 3584


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_activations_are_what_a_forward_pass_saves(model_type: str, dtype: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    fields = {"model_type": model_type, **sizes, **ARCHITECTURES[model_type]}
    shape = model_shape(
        ModelConfig.model_validate({"init": fields, "tokenizer": "bytes", "dtype": dtype}), None
    )
    model: Any = new_model(fields, byte_tokenizer(), seed=0, dtype=getattr(torch, dtype), attention="sdpa")
    model.train()
    with _counted(model) as seen:
        positions = torch.arange(128)[None]
        model.base_model(input_ids=positions + 5, position_ids=positions, use_cache=False)
    assert shape.activation_bytes == pytest.approx(sum(seen.values()) / 128, rel=0.05)
    assert shape.weights == sum(param.numel() for param in model.parameters())


def test_adapters_and_critics_have_the_parameters_that_are_trained(task: Path) -> None:
    for lora in (None, LoraConfig(rank=4), LoraConfig(rank=2, target_modules=["q_proj", "v_proj"])):
        config = ModelConfig(path=str(task / "model"), lora=lora)
        shape = model_shape(config, task / "model")
        model = load_model(config, task / "model", seed=0).model
        trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
        assert shape.trained_count == trained
        assert shape.weights == sum(param.numel() for param in model.parameters())
    config = ModelConfig(path=str(task / "model"))
    critic = load_critic(config, task / "model", seed=0).model
    shape = model_shape(config, task / "model", scalar=True)
    assert shape.weights == sum(param.numel() for param in critic.parameters())


@pytest.mark.parametrize("name", ["adamw", "adafactor", "torchao_adamw_8bit", "bnb_adamw_8bit"])
def test_a_plan_is_what_the_ledger_measures(task: Path, tmp_path: Path, name: str) -> None:
    need(name)
    optimizer = {"name": name}
    stage = toy.rl(
        task,
        advantage={"name": "gae"},
        kl={"where": "reward", "estimator": "k1"},
        critic={"optimizer": optimizer},
        optimizer=optimizer,
    )
    with ExitStack() as stack:
        (found,) = toy.take_steps(toy.prepared(tmp_path, stage, stack), 1)
    phases = by_name(plan(tmp_path, stage))
    parts = phases["update"].parts
    weights = parts["policy"] + parts["critic"] + parts["reference"]
    assert found["memory/weights_mb"] * MIB == pytest.approx(weights, rel=0.001)
    moments = parts["policy moments"] + parts["critic moments"]
    assert found["memory/optimizer_mb"] * MIB == pytest.approx(moments, rel=0.05)
    assert found["memory/gradients_mb"] * MIB == pytest.approx(parts["gradients"], rel=0.001)


def test_what_waits_on_the_host_leaves_the_phases_that_do_not_use_it(task: Path, tmp_path: Path) -> None:
    stage = toy.rl(
        task,
        advantage={"name": "gae"},
        critic={"optimizer": {"offload": True}},
        rollout={"name": "vllm"},
        memory={"offload": ["policy", "critic"]},
    )
    found = plan(tmp_path, stage)
    phases = by_name(found)
    assert "policy" not in phases["rollout"].parts
    assert "critic" not in phases["update"].parts
    assert "policy" not in phases["critic"].parts
    assert "critic moments" not in phases["critic"].parts
    assert phases["critic"].parts["visiting moments"] < phases["update"].parts["policy moments"]
    assert found.host > phases["update"].parts["policy"]
    assert any("vllm sleeps" in text for text in found.assumed)


def test_processes_divide_what_is_cut(task: Path, tmp_path: Path) -> None:
    stage = toy.sft(task)
    run = {"output": str(tmp_path), "stages": {"sft": stage}, "parallel": {"data_shard": 4}}
    whole = plan(tmp_path, stage).phases[0].parts
    (cut,) = plan_run(RunConfig.model_validate(run), Setting(gpus=4))
    assert cut.phases[0].parts["model"] == whole["model"] // 4
    assert cut.phases[0].parts["activations"] == whole["activations"]


def test_a_gradient_in_the_backward_pass_and_checkpointing_take_less(task: Path, tmp_path: Path) -> None:
    plain = plan(tmp_path, toy.sft(task)).phases[0].parts
    model = {"path": str(task / "model"), "gradient_checkpointing": True}
    stage = toy.sft(task, optimizer={"in_backward": True, "grad_clip": 0}) | {"model": model}
    less = plan(tmp_path, stage).phases[0].parts
    assert less["gradients"] < plain["gradients"] / 2
    assert less["activations"] < plain["activations"]


def test_the_command_says_whether_it_fits(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    stages = {"sft": toy.sft(task), "rl": toy.rl(task, rollout={"name": "hf"}) | {"model": "sft"}}
    path.write_text(dump_yaml({"output": str(tmp_path / "run"), "stages": stages}))
    assert main(["plan", str(path), "--memory", "80", "--prompt-tokens", "16"]) == 0
    shown = capsys.readouterr().out
    assert "most in" in shown
    assert "fits in 80.0 GiB" in shown
    assert main(["plan", str(path), "--memory", "0.001", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["stages"]
    assert set(found) == {"sft", "rl"}
    assert found["rl"]["fits"] is False
    assert found["rl"]["peak"]["bytes"] == max(phase["total"] for phase in found["rl"]["phases"].values())
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_planned_is_said(task: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config.json"):
        plan(tmp_path, toy.sft(task) | {"model": str(tmp_path)})
    export = {"kind": "export", "model": str(task / "model")}
    with pytest.raises(UserError, match="no stage trains"):
        plan_run(RunConfig.model_validate({"output": "x", "stages": {"export": export}}), Setting())
