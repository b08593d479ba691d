from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from posttune.errors import ModelError
from posttune.models.tokenizer import byte_tokenizer, load_tokenizer, save_tokenizer

BYTES = byte_tokenizer()


@given(st.text())
def test_decode_undoes_encode(text: str) -> None:
    assert BYTES.decode(BYTES(text)["input_ids"]) == text


@given(st.text(alphabet=st.characters(exclude_characters="<>", exclude_categories=["Cs"])))
def test_one_token_per_byte(text: str) -> None:
    assert BYTES(text)["input_ids"] == [3 + byte for byte in text.encode()]


def test_special_tokens() -> None:
    assert len(BYTES) == 259
    assert (BYTES.pad_token_id, BYTES.bos_token_id, BYTES.eos_token_id) == (0, 1, 2)
    assert BYTES.decode([68, 2], skip_special_tokens=True) == "A"


def test_saved_folder_reads_back_and_is_known_to_transformers_4(tmp_path: Path) -> None:
    save_tokenizer(BYTES, tmp_path)
    again = load_tokenizer(tmp_path)
    text = "  naïve\t日本 🙂 A  b "
    assert again(text)["input_ids"] == BYTES(text)["input_ids"]
    assert again.decode(again(text)["input_ids"]) == text
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_clear_refusals(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer(tmp_path)
