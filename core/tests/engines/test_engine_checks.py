"""What is found before an engine starts, and where its answers end; no engine is needed."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from posttune.engines import environment, preflight
from posttune.engines.answers import Answer
from posttune.engines.ends import settled
from posttune.engines.facts import Facts, read_facts
from posttune.engines.folder import folder_for
from posttune.engines.preflight import Machine
from posttune.engines.problems import Explainer, Rule, Told
from posttune.engines.requests import check, seed_of
from posttune.engines.table import check_table, fields_of
from posttune.errors import DataError, RunError, UserError
from posttune.models.tokenizer import byte_tokenizer
from posttune.types import Request, Sampling
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FACTS = Facts(("LlamaForCausalLM",), 2, 8, 2, 64, 512, False, {"w": (1024, 1024, 512)})
WHO = "engine"


def test_a_model_that_is_shorter_than_the_run() -> None:
    short = Facts(**{**vars(FACTS), "positions": 100})
    with pytest.raises(UserError, match="the model takes 100"):
        preflight.check_length(short, 101, WHO)
    preflight.check_length(short, 100, WHO)
    preflight.check_length(Facts(**{**vars(FACTS), "positions": None}), 1 << 20, WHO)
    with pytest.raises(UserError, match="no weights of type float64"):
        preflight.check_dtype("float64", "It", WHO)


def test_weights_that_are_cut_must_be_in_a_folder(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(UserError, match="cut over processes"):
            folder_for(None, model, tmp_path, WHO)
        (tmp_path / "config.json").write_text("{}", "utf-8")
        assert folder_for(tmp_path, model, tmp_path, WHO) == tmp_path
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("size", "device", "gpus", "said"),
    [
        (2, "cpu", 0, "the engine runs on a CPU"),
        (4, "cuda:0", 2, "this machine has 2 GPUs"),
        (3, "cuda:0", 8, r"3 does not divide the model's 8 attention heads.*\[1, 2, 4, 8\]"),
    ],
)
def test_a_split_that_does_not_fit(size: int, device: str, gpus: int, said: str) -> None:
    with pytest.raises(UserError, match=f"(?s){said}"):
        preflight.check_split(FACTS, size, device, Machine(gpus))
    preflight.check_split(FACTS, 4, "cuda:0", Machine(4))
    preflight.check_split(FACTS, 1, device, Machine(0))


def test_memory_that_does_not_suffice_is_told_with_a_ledger() -> None:
    gib = 1 << 30
    whole = Machine(1, 10 * gib)  # the weights take 2 GiB in float32
    preflight.check_memory(FACTS, 0.4, "float32", whole, 1, 5 * gib, sleeps=True)
    with pytest.raises(UserError, match=r"(?s)too little for the engine's weights.*2\.00 GiB.*above 0\.22"):
        preflight.check_memory(FACTS, 0.2, "float32", whole, 1, 0, sleeps=True)
    with pytest.raises(UserError, match=r"(?s)leaves training too little.*7\.00 GiB.*below 0\.30"):
        preflight.check_memory(FACTS, 0.4, "float32", whole, 1, 7 * gib, sleeps=True)


def test_requests_that_cannot_be_answered() -> None:
    good, empty, long = Request("a", (1, 2), 0), Request("b", (), 0), Request("c", (1,) * 9, 0)
    check([good], Sampling(max_new_tokens=2), 4, tokenizer=True, who=WHO)
    for bad in (empty, long):
        with pytest.raises(DataError, match=f"request '{bad.id}'"):
            check([good, bad], Sampling(max_new_tokens=2), 10, tokenizer=True, who=WHO)
    with pytest.raises(UserError, match="need a tokenizer"):
        check([good], Sampling(stop=("x",)), 999, tokenizer=False, who=WHO)
    with pytest.raises(UserError, match="empty stop string"):
        check([good], Sampling(stop=("",)), 999, tokenizer=True, who=WHO)


def test_seeds_of_neighbours_do_not_overlap() -> None:
    seeds = [seed_of(Request("x", (1,), seed)) for seed in range(1000)]
    drawn = {seed + index for seed in seeds for index in range(8)}
    assert len(drawn) == 8000
    assert max(drawn) < 1 << 63
    assert seed_of(Request("x", (1,), 5)) == seed_of(Request("y", (2, 3), 5))
    assert seed_of(Request("x", (1,), (1 << 63) - 1)) < 1 << 62


def write_model(folder: Path, config: dict[str, Any], shapes: dict[str, list[int]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    entries = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()
    }
    head = json.dumps(entries | {"__metadata__": {"format": "pt"}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head)
    return folder


def test_facts_of_a_folder(tmp_path: Path) -> None:
    config = {
        "architectures": ["X"],
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "max_position_embeddings": 99,
        "tie_word_embeddings": True,
    }
    found = read_facts(write_model(tmp_path / "a", config, {"w": [2, 3], "b": [4]}), WHO)
    assert (found.head_dim, found.kv_heads, found.positions, found.tied) == (32, 4, 99, True)
    assert found.parameters == 10
    assert found.token_bytes("bfloat16") == 2 * 3 * 4 * 32 * 2
    scaled = {**config, "rope_scaling": {"rope_type": "yarn", "factor": 4}}
    assert read_facts(write_model(tmp_path / "b", scaled, {}), WHO).positions is None
    nested = read_facts(write_model(tmp_path / "c", {"architectures": ["Y"], "text_config": config}, {}), WHO)
    assert (nested.layers, nested.architectures) == (3, ("Y",))
    unnamed = {"model_type": "qwen2", "text_config": config}
    assert read_facts(write_model(tmp_path / "d", unnamed, {}), WHO).architectures == ("Qwen2ForCausalLM",)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no Hugging Face folder"):
        read_facts(tmp_path, WHO)
    folder = write_model(tmp_path / "a", {}, {})
    (folder / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(UserError, match="not a safetensors file"):
        read_facts(folder, WHO)


def test_the_environment_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "x",
        "CUDA_VISIBLE_DEVICES": "4,5,6,7",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "SAID": "by the user",
    }.items():
        monkeypatch.setenv(name, value)
    settings = environment.unless_set({"SAID": "by us", "NEW": "1"})
    found = environment.of_child("cuda:1", 2, settings, 3)
    assert not {"RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "PYTORCH_CUDA_ALLOC_CONF"} & found.keys()
    assert (found["CUDA_VISIBLE_DEVICES"], found["OMP_NUM_THREADS"]) == ("5,6", "3")
    assert (found["SAID"], found["NEW"]) == ("by the user", "1")
    assert environment.of_child("cpu", 1, {}, 1)["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_a_table_against_a_class_that_is_not_imported(tmp_path: Path) -> None:
    path = tmp_path / "arguments.py"
    path.write_text(
        "import nowhere\nclass A:\n    one: int = 0\n    two = 1\nclass B:\n    three: int\n", "utf-8"
    )
    known = fields_of(path, "A")
    assert known == {"one"}
    assert fields_of(path, "C") == set()
    assert fields_of(path) == {"one", "three"}
    check_table({"one": 1}, known, {}, "engine 1", "A")
    with pytest.raises(
        UserError, match=r"(?s)no argument 'oen'.*did you mean 'one'.*fields of A in engine 1"
    ):
        check_table({"oen": 1}, known, {}, "engine 1", "A")
    with pytest.raises(UserError, match=r"(?s)one is decided by the run.*remove one"):
        check_table({"one": 1}, known, {"one": "the run"}, "engine 1", "A")


def test_what_an_engine_says_is_explained() -> None:
    rules = [
        Rule(("out of memory",), "not enough memory", "less", user=False, memory=True),
        Rule((r"lib\w+",), "torn", "new"),
    ]
    explainer = Explainer(WHO, rules, "-v says more")
    memory = explainer.explain(Told("E", "CUDA out of memory"), "start", "LEDGER")
    assert isinstance(memory, RunError)
    assert "LEDGER" in str(memory)
    unknown = explainer.explain(Told("KeyError", ""), "start", "LEDGER")
    assert "(no message)" in str(unknown)
    assert "-v says more" in str(unknown)
    assert explainer.read(["all is well"], "start") is None
    assert explainer.read(["ignored: libx is missing"], "start") is None
    found = explainer.read(
        ["Traceback (most recent call last):", "libx is missing", "out of memory", "the end"], "start"
    )
    assert found is not None
    assert "at start: out of memory" in str(found)


@pytest.mark.parametrize(
    ("text", "reason", "sampling", "kept", "ended"),
    [
        ("abc", "l", {}, 3, "l"),
        ("abc", "l", {"eos_ids": frozenset({3 + ord("c")})}, 3, "s"),
        ("abcd", "l", {"eos_ids": frozenset({3 + ord("b")})}, 2, "s"),
        ("abcd", "s", {"stop": ("cd",)}, 4, "s"),
        ("abcd", "l", {"stop": ("cd",)}, 4, "s"),
        ("abcdef", "l", {"stop": ("zz", "bcd")}, 4, "s"),
        ("a→b", "l", {"stop": ("→",)}, 4, "s"),
        ("abcd", "l", {"stop": ("d",), "eos_ids": frozenset({3 + ord("b")})}, 2, "s"),
        ("abcd", "l", {"stop": ("a",), "eos_ids": frozenset({3 + ord("b")})}, 1, "s"),
    ],
)
def test_where_an_answer_ends(
    text: str, reason: str, sampling: dict[str, Any], kept: int, ended: str
) -> None:
    words = byte_tokenizer()
    ids = words.encode(text)
    assert ids[0] == 3 + ord("a")
    found = settled(Answer(ids, [-float(i) for i in range(len(ids))], reason), Sampling(**sampling), words)
    assert (list(found.token_ids), found.reason) == (ids[:kept], ended)
    assert len(found.logprobs or ()) == kept
