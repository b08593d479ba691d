from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from data_files import run, write_jsonl
from data_tokenizers import CHATML, PLAIN, chatml, llama
from posttune.data.dataset import SampleDataset
from posttune.errors import DataError
from posttune.models.tokenizer import byte_tokenizer, load_tokenizer, save_tokenizer

ROWS: list[dict[str, Any]] = [
    {"prompt": f"What is {n}?", "response": f"It is {n}." * (1 + n % 3), "level": n, "tags": ["x", n]}
    for n in range(1200)
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> SampleDataset:
    folder = tmp_path_factory.mktemp("text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("posttune.data.json_rows.BLOCK_BYTES", 1 << 15)
        return SampleDataset(run(write_jsonl(folder / "rows.jsonl", ROWS), folder / "out").path)


class TestRows:
    def test_order_and_content_over_batches(self, text: SampleDataset) -> None:
        assert len(text) == len(ROWS)
        assert len(list(text.batches())) > 1
        for index in (0, 999, 1000, 1001, 1199, -1):
            row = text[index]
            assert {name: row[name] for name in ROWS[0]} == ROWS[index]
        assert [row["level"] for row in text] == list(range(1200))

    def test_places(self, text: SampleDataset) -> None:
        assert text.location(1134).row == 1135
        assert text.location(0).file.endswith("rows.jsonl")

    def test_columns(self, text: SampleDataset) -> None:
        assert text.columns == ("prompt", "response", "reference", "level", "tags")
        assert text.metadata_columns == ("level", "tags")
        assert not text.is_tokenized

    def test_missing_values_are_counted(self, tmp_path: Path) -> None:
        rows: list[dict[str, Any]] = [
            {"prompt": "a", "gold": 1},
            {"prompt": "b"},
            {"prompt": "c", "gold": None},
        ]
        dataset = SampleDataset(run(write_jsonl(tmp_path / "x.jsonl", rows), tmp_path / "out").path)
        assert dataset.missing("prompt") == 0
        assert dataset.missing("gold") == 2
        assert dataset.missing("reference") == 3
        assert dataset.missing("nowhere") == 3

    def test_no_such_row(self, text: SampleDataset) -> None:
        for index in (1200, -1201):
            with pytest.raises(IndexError, match="1200 rows"):
                text[index]

    def test_it_travels_to_other_processes(self, text: SampleDataset) -> None:
        assert pickle.loads(pickle.dumps(text))[7] == text[7]

    def test_tokens_of_a_few_rows(self, tmp_path: Path) -> None:
        pairs = [{"prompt": "p" * n, "chosen": "c" * 3 * n, "rejected": "r"} for n in range(1, 4)]
        plain = [{"prompt": "p", "response": "x" * n} for n in range(1, 4)]
        found = {}
        for name, rows in (("pairs", pairs), ("plain", plain)):
            path = write_jsonl(tmp_path / name, rows)
            dataset = SampleDataset(run(path, tmp_path / f"{name}-out", tokenizer="bytes").path)
            assert dataset.tokens_of([2, 0], "input_ids") == dataset.lengths[[2, 0]].tolist()
            found[name] = dataset.tokens_of([2, 0], "input_ids", "rejected_ids")
        assert found["pairs"] == [(3 + 9 + 1) + (3 + 1 + 1), (1 + 3 + 1) + (1 + 1 + 1)]  # each with its EOS
        assert found["plain"] == [1 + 3 + 1, 1 + 1 + 1]

    def test_lengths_need_tokens(self, text: SampleDataset) -> None:
        with pytest.raises(DataError, match="holds text, not tokens"):
            _ = text.lengths


class TestDamage:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return run(write_jsonl(tmp_path / "x.jsonl", ROWS[:3]), tmp_path / "out").path

    def test_paths(self, folder: Path, tmp_path: Path) -> None:
        assert len(SampleDataset(folder / "train.bin")) == 3
        with pytest.raises(DataError, match="no such dataset"):
            SampleDataset(tmp_path / "nowhere")
        with pytest.raises(DataError, match=r"posttune data convert"):
            SampleDataset(tmp_path / "x.jsonl")
        with pytest.raises(DataError, match=r"no meta\.json"):
            SampleDataset(tmp_path)

    @pytest.mark.parametrize("keep", [0, 100, -10])
    def test_a_cut_file(self, folder: Path, keep: int) -> None:
        path = folder / "train.bin"
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(DataError, match=r"train\.bin: has .* bytes where meta.json says"):
            SampleDataset(folder)

    def test_a_changed_file(self, folder: Path) -> None:
        path = folder / "train.bin"
        path.write_bytes(b"x" * path.stat().st_size)
        with pytest.raises(DataError, match="cannot be read"):
            SampleDataset(folder)

    def test_meta(self, folder: Path) -> None:
        path = folder / "meta.json"
        meta = json.loads(path.read_text())
        path.write_text(json.dumps({**meta, "schema": 99}))
        with pytest.raises(DataError, match=r"later posttune \(schema 99"):
            SampleDataset(folder)
        for wrong in ("{", "[]", "{}"):
            path.write_text(wrong)
            with pytest.raises(DataError, match=r"cannot be read|is not the meta"):
                SampleDataset(folder)


class TestTokenized:
    def test_same_tokenizer_same_object(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "x.jsonl", ROWS[:3])
        dataset = SampleDataset(run(path, tmp_path / "out", tokenizer="bytes").path)
        assert dataset.tokenized(byte_tokenizer()) is dataset
        assert dataset.tokenized(load_tokenizer(dataset.folder)) is dataset
        assert dataset.tokenized(byte_tokenizer(), max_length=1000) is dataset
        assert dataset.tokenized(byte_tokenizer(), "none") is dataset  # no template either way

    def test_text_is_tokenised_once(self, text: SampleDataset, tmp_path: Path) -> None:
        first = text.tokenized(byte_tokenizer(), cache_dir=tmp_path)
        stamp = (first.folder / "train.bin").stat().st_mtime_ns
        again = text.tokenized(byte_tokenizer(), cache_dir=tmp_path)
        assert (again.folder / "train.bin").stat().st_mtime_ns == stamp
        assert first.folder.parent == tmp_path
        assert first.fingerprint == again.fingerprint != text.fingerprint
        assert len(first) == len(text)
        for index in (0, 1100):
            row = first[index]
            assert {name: row[name] for name in ROWS[0]} == ROWS[index]
            assert bytes(token - 3 for token in row["prompt_ids"]).decode() == ROWS[index]["prompt"]
            assert first.location(index) == text.location(index)
        assert first.lengths.tolist() == [len(r["prompt"]) + len(r["response"]) + 1 for r in ROWS]
        assert first.prompt_lengths.tolist() == [len(r["prompt"]) for r in ROWS]

    def test_another_tokenizer_makes_a_copy(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "x.jsonl", ROWS[:3])
        dataset = SampleDataset(run(path, tmp_path / "out", tokenizer="bytes").path)
        other = dataset.tokenized(llama())
        assert other.folder.parent == dataset.folder / "tokenized"
        assert other[0]["input_ids"][0] == llama().bos_token_id
        assert llama().decode(other[0]["prompt_ids"], skip_special_tokens=True) == ROWS[0]["prompt"]
        assert SampleDataset(dataset.folder)[0] == dataset[0]

    def test_limits(self, text: SampleDataset, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"rows\.jsonl:\d+: \d+ tokens, more than the limit of 30"):
            text.tokenized(byte_tokenizer(), max_length=30, cache_dir=tmp_path)
        whole = text.tokenized(byte_tokenizer(), cache_dir=tmp_path)
        with pytest.raises(DataError, match=r"more than the limit of 30 \(and \d+ rows more\)"):
            whole.tokenized(byte_tokenizer(), max_length=30)
        cut = whole.tokenized(byte_tokenizer(), max_length=30, truncation="left", cache_dir=tmp_path)
        assert cut.lengths.max() == 30
        assert cut[2]["input_ids"][-1] == byte_tokenizer().eos_token_id

    def test_limits_of_the_conversion_hold_later(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "x.jsonl", ROWS[:3])
        dataset = SampleDataset(run(path, tmp_path / "out", max_length=20, truncation="right").path)
        assert dataset.tokenized(byte_tokenizer()).lengths.max() == 20

    def test_templates(self, text: SampleDataset, tmp_path: Path) -> None:
        chat = text.tokenized(chatml(), cache_dir=tmp_path)
        assert chat.meta["template"]["text"] == CHATML
        assert str(chatml().decode(chat[0]["prompt_ids"])).endswith("<|im_start|>assistant\n")
        plain = text.tokenized(chatml(), "none", cache_dir=tmp_path)
        assert chatml().decode(plain[0]["prompt_ids"]) == ROWS[0]["prompt"]
        assert chat.tokenized(chatml()) is chat
        again = chat.tokenized(chatml(), "none", cache_dir=tmp_path)
        assert again[0]["input_ids"] == plain[0]["input_ids"]

    def test_a_recorded_template_file_is_not_needed_again(self, tmp_path: Path) -> None:
        file = tmp_path / "t.jinja"
        file.write_text(PLAIN)
        save_tokenizer(chatml(), tmp_path / "tok")
        path = write_jsonl(tmp_path / "x.jsonl", ROWS[:3])
        dataset = SampleDataset(
            run(path, tmp_path / "out", tokenizer=tmp_path / "tok", template=str(file)).path
        )
        file.unlink()
        assert dataset.tokenized(chatml()) is dataset
        other = dataset.tokenized(llama())
        assert str(llama().decode(other[0]["prompt_ids"])).startswith("### user:\n")

    def test_preference_and_messages_survive(self, tmp_path: Path) -> None:
        messages = [{"role": "user", "content": "hi"}]
        rows = [{"prompt": messages, "chosen": "good", "rejected": "bad", "tools": None}]
        dataset = SampleDataset(run(write_jsonl(tmp_path / "x.jsonl", rows), tmp_path / "out").path)
        row = dataset.tokenized(chatml())[0]
        assert row["messages"] == messages
        assert str(chatml().decode(row["input_ids"])).endswith("assistant\ngood<|im_end|>")
        assert str(chatml().decode(row["rejected_ids"])).endswith("assistant\nbad<|im_end|>")

    def test_rows_without_tokens_are_named(self, tmp_path: Path) -> None:
        tokenizer = chatml(template="{{ raise_exception('no') }}")
        path = write_jsonl(tmp_path / "x.jsonl", ROWS[:3])
        dataset = SampleDataset(run(path, tmp_path / "out").path)
        with pytest.raises(DataError, match=r"x\.jsonl:1: the chat template refuses"):
            dataset.tokenized(tokenizer)
        assert not list((dataset.folder / "tokenized").iterdir())
