"""The class that is chosen without `AutoTokenizer` is the one that it chooses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from posttune.models import tokenizer_class as module
from posttune.models.tokenizer import byte_tokenizer, save_tokenizer
from posttune.models.tokenizer_class import tokenizer_class
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.models.auto.tokenization_auto import MODEL_IDS_TO_TOKENIZERS_BACKEND

LISTED = ("qwen2", *module._MODEL_TYPES, *module._GENERAL_ONLY)
OTHERS = ("bert", "deepseek_v3", "llava", "mistral", "no_such_type", "qwen3_5", "t5")
NAMES = (*module._GENERAL, *module._SPECIFIC, *(f"{name}Fast" for name in module._SPECIFIC))
OTHER_NAMES = ("BertTokenizer", "ByT5Tokenizer", "LlamaTokenizer", "MyTokenizer", None)


@pytest.fixture(autouse=True)
def as_where_nothing_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHOOSER", "not imported")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(byte_tokenizer(), tmp_path)
    return tmp_path


def write(folder: Path, name: str, **values: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    path = folder / name
    found = json.loads(path.read_text()) if path.exists() else {}
    kept = {key: value for key, value in {**found, **values}.items() if value is not None}
    path.write_text(json.dumps(kept))


@pytest.mark.parametrize("name", [*NAMES, *OTHER_NAMES])
def test_never_another_class(name: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreTrainedTokenizerBase, "from_pretrained", classmethod(lambda cls, *_, **__: cls))
    write(folder, "tokenizer_config.json", tokenizer_class=name)
    chosen = {}
    for model_type in (None, *LISTED, *OTHERS):
        if model_type is not None:
            write(folder, "config.json", model_type=model_type)
        chosen[model_type] = tokenizer_class(folder)
        expected = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        assert chosen[model_type] in (None, expected), (name, model_type)
    assert not any(chosen[model_type] for model_type in OTHERS)
    assert (chosen[None] is not None) == (chosen["llama"] is not None) == (name in NAMES)


def test_what_is_chosen(folder: Path) -> None:
    assert tokenizer_class(folder) is PreTrainedTokenizerFast
    write(folder, "config.json", model_type="qwen2")
    assert tokenizer_class(folder) is None  # such models get a class of their own
    write(folder, "tokenizer_config.json", tokenizer_class="Qwen2TokenizerFast")
    assert tokenizer_class(folder) is Qwen2Tokenizer


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, "own.Own"]}}),
        ("tokenizer_config.json", {"tokenizer_class": ["PreTrainedTokenizerFast"]}),
        ("config.json", {"auto_map": {"AutoConfig": "own.Own"}, "model_type": "llama"}),
        ("config.json", {"configuration_files": ["config.5.0.0.json"], "model_type": "llama"}),
        ("config.json", {"architectures": ["LlamaForCausalLM"]}),
        ("config.json", {}),
    ],
)
def test_asked_about_what_may_lead_elsewhere(name: str, values: dict[str, Any], folder: Path) -> None:
    write(folder, name, **values)
    assert tokenizer_class(folder) is None


def test_asked_about_files_that_are_missing_or_broken(folder: Path) -> None:
    for name, text in (("tokenizer_config.json", "{"), ("tokenizer_config.json", "[1]"), ("config.json", "")):
        kept = (folder / name).read_text() if (folder / name).exists() else "{}"
        (folder / name).write_text(text)
        assert tokenizer_class(folder) is None
        (folder / name).write_text(kept)
    (folder / "config.json").unlink()
    assert tokenizer_class(folder) is not None
    (folder / "tokenizer.json").unlink()
    assert tokenizer_class(folder) is None


def test_asked_where_it_may_know_the_model_by_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pattern in MODEL_IDS_TO_TOKENIZERS_BACKEND:
        assert pattern.startswith(module._MATCHED_BY_NAME)
    write(folder, "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    write(folder, "config.json", model_type="llama")
    assert tokenizer_class(folder) is not None
    write(folder, "config.json", _name_or_path="deepseek-ai/deepseek-coder-1.3b")
    assert tokenizer_class(folder) is None
    write(folder, "config.json", _name_or_path=None)
    place = tmp_path / "elsewhere" / "DeepSeek-AI"
    place.mkdir(parents=True)
    (place / "deepseek-coder-1.3b").symlink_to(folder)
    monkeypatch.chdir(place.parent)
    assert tokenizer_class(Path("DeepSeek-AI/deepseek-coder-1.3b")) is None


def test_asked_where_it_was_imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # this module imports it
    assert tokenizer_class(folder) is None
