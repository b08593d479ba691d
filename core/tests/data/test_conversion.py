from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from data_files import SHARED, SMALL, need, run, write_jsonl
from data_tokenizers import chatml
from posttune.config.models import PluginRef
from posttune.data.conversion import ConvertRequest, DataConverter, convert, preview
from posttune.data.dataset import SampleDataset
from posttune.errors import DataError, ModelError, UnknownPlugin
from posttune.models.tokenizer import save_tokenizer

Rows = list[dict[str, Any]]
ROWS: Rows = [{"prompt": f"{n}+{n}=", "response": str(2 * n), "level": n % 3} for n in range(25)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "data" / "out"


class TestMeta:
    def test_what_is_recorded(self, source: Path, to: Path) -> None:
        report = run(source, to, tokenizer="bytes")
        meta = json.loads((to / "meta.json").read_text())
        assert meta["schema"] == 1
        assert meta["rows"] == meta["rows_in"] == report.rows_out == 25
        assert meta["fingerprint"] == report.fingerprint
        assert meta["columns"] == {
            "prompt": 25, "response": 25, "prompt_ids": 25, "input_ids": 25, "loss_mask": 25, "level": 25
        }  # fmt: skip
        assert meta["converter"] == {"name": "prompt_response", "options": {}}
        assert meta["map"] == {"prompt": "prompt", "response": "response"}
        assert meta["sources"][0]["bytes"] == source.stat().st_size
        assert len(meta["sources"][0]["sha256"]) == 64
        assert meta["template"] == {"choice": "auto", "applied": False, "sha256": None, "text": None}
        assert meta["tokenizer"]["eos_id"] == 2
        assert (to / "tokenizer_config.json").is_file()

    def test_lengths(self, source: Path, to: Path) -> None:
        run(source, to, tokenizer="bytes")
        meta = SampleDataset(to).meta
        total = meta["lengths"]["total"]
        lengths = sorted(len(row["prompt"]) + len(row["response"]) + 1 for row in ROWS)
        assert meta["lengths"]["unit"] == "tokens"
        assert (total["min"], total["max"], total["sum"]) == (lengths[0], lengths[-1], sum(lengths))
        assert total["p50"] == lengths[12]
        assert total["histogram"]["edges"] == [1, 2, 4, 8, 16]
        assert sum(total["histogram"]["counts"]) == 25
        run(source, to.with_name("text"))
        assert SampleDataset(to.with_name("text")).meta["lengths"]["unit"] == "characters"

    def test_duplicates_and_odd_texts_are_counted(self, tmp_path: Path, to: Path) -> None:
        rows = [
            {"prompt": "a", "response": "b"},
            {"prompt": "a", "response": "b"},
            {"prompt": "a", "response": "caf\u00c3\u00a9"},
            {"prompt": "\ufffd", "response": "a\x07"},
            {"prompt": "R&D; AT&T", "response": "x"},
        ]
        report = run(write_jsonl(tmp_path / "x.jsonl", rows), to)
        assert report.warnings == [
            {"code": "control_character", "count": 1},
            {"code": "duplicate_rows", "count": 1},
            {"code": "mojibake", "count": 1},
            {"code": "replacement_character", "count": 1},
        ]

    def test_the_file_is_plain_arrow(self, source: Path, to: Path) -> None:
        run(source, to, tokenizer="bytes")
        table = pa.ipc.open_file(str(to / "train.bin")).read_all()
        assert table.num_rows == 25
        assert table["input_ids"].type == pa.list_(pa.int32())
        assert table["loss_mask"].type == pa.list_(pa.bool_())
        assert table["prompt"][3].as_py() == "3+3="


class TestAgain:
    def test_equal_does_nothing(self, source: Path, to: Path) -> None:
        first = run(source, to)
        stamp = (to / "train.bin").stat().st_mtime_ns
        again = run(source, to)
        assert again.unchanged
        assert again.as_json() == first.as_json()
        assert (to / "train.bin").stat().st_mtime_ns == stamp
        assert run(source, to, overwrite=True).unchanged

    def test_moved_sources_are_equal(self, source: Path, to: Path) -> None:
        run(source, to)
        assert run(source.rename(source.with_name("moved.jsonl")), to).unchanged

    @pytest.mark.parametrize(
        "change",
        [
            {"tokenizer": "bytes"},
            {"map": {"response": "level"}},
            {"on_bad_row": "skip"},
            {"max_length": 9},
            {"converter": "prompt_response"},
        ],
    )
    def test_other_settings_need_overwrite(self, source: Path, to: Path, change: dict[str, Any]) -> None:
        first = run(source, to)
        with pytest.raises(DataError, match=r"holds another dataset.*\n.*--overwrite"):
            run(source, to, **change)
        assert SampleDataset(to).fingerprint == first.fingerprint
        assert run(source, to, overwrite=True, **change).fingerprint != first.fingerprint

    def test_other_rows_need_overwrite(self, source: Path, to: Path) -> None:
        run(source, to)
        write_jsonl(source, ROWS[:3])
        with pytest.raises(DataError, match="holds another dataset"):
            run(source, to)
        assert run(source, to, overwrite=True).rows_out == 3

    def test_a_damaged_dataset_is_not_taken_for_equal(self, source: Path, to: Path) -> None:
        run(source, to)
        (to / "train.bin").write_bytes((to / "train.bin").read_bytes()[:-8])
        with pytest.raises(DataError, match="another dataset"):
            run(source, to)
        assert not run(source, to, overwrite=True).unchanged

    def test_what_is_no_dataset_is_never_replaced(self, source: Path, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="is a file"):
            run(source, source, overwrite=True)
        with pytest.raises(DataError, match="holds something that is no dataset"):
            run(source, tmp_path, overwrite=True)
        assert source.is_file()

    def test_an_empty_folder_is_used(self, source: Path, to: Path) -> None:
        to.mkdir(parents=True)
        assert run(source, to).rows_out == 25


class TestBadRows:
    def write(self, tmp_path: Path, bad: int) -> Path:
        path = write_jsonl(tmp_path / "x.jsonl", ROWS)
        with path.open("a") as file:
            file.write("{\n" * 0 + "oops\n" * bad)
        return path

    def test_ten_are_named(self, tmp_path: Path, to: Path) -> None:
        with pytest.raises(DataError) as caught:
            run(self.write(tmp_path, 30), to)
        message = str(caught.value)
        assert message.startswith("10 rows or more cannot be used:")
        assert message.count("x.jsonl:") == 10
        assert "x.jsonl:26: JSON syntax" in message
        assert not to.exists()

    def test_skipped_rows_are_listed(self, tmp_path: Path, to: Path) -> None:
        report = run(self.write(tmp_path, 2), to, on_bad_row="skip")
        assert (report.rows_in, report.rows_out) == (27, 25)
        assert [entry["row"] for entry in report.rejected] == [26, 27]
        assert SampleDataset(to).meta["rejected"] == 2
        assert run(self.write(tmp_path, 2), to, on_bad_row="skip").rejected == report.rejected

    def test_none_left(self, tmp_path: Path, to: Path) -> None:
        path = write_jsonl(
            tmp_path / "x.jsonl", [{"prompt": "", "response": "a"}, {"prompt": "a", "response": ""}]
        )
        with pytest.raises(DataError, match="no row is left: all 2 are bad"):
            run(path, to, on_bad_row="skip")
        assert not to.exists()

    def test_too_long_rows(self, tmp_path: Path, to: Path) -> None:
        path = write_jsonl(tmp_path / "x.jsonl", [*ROWS, {"prompt": "p" * 50, "response": "r"}])
        with pytest.raises(DataError, match=r"x\.jsonl:26: 52 tokens, more than the limit of 20"):
            run(path, to, tokenizer="bytes", max_length=20)
        report = run(path, to, tokenizer="bytes", max_length=20, on_bad_row="skip")
        assert report.rows_out == 25
        cut = run(path, to.with_name("cut"), tokenizer="bytes", max_length=20, truncation="left")
        assert {"code": "truncated", "count": 1} in cut.warnings
        dataset = SampleDataset(cut.path)
        assert dataset.meta["truncated"] == {"rows": 1, "tokens": 32}
        assert dataset.lengths.max() == 20
        assert dataset[25]["loss_mask"] == [False] * 18 + [True, True]


class TestSettings:
    def test_unknown_converter(self, source: Path, to: Path) -> None:
        with pytest.raises(UnknownPlugin, match="gsm8k"):
            run(source, to, converter="gsm9k")

    def test_missing_tokenizer(self, source: Path, to: Path) -> None:
        with pytest.raises(ModelError, match="no such folder"):
            run(source, to, tokenizer="nowhere")

    def test_several_files(self, tmp_path: Path, to: Path) -> None:
        write_jsonl(tmp_path / "a.jsonl", ROWS[:2])
        (tmp_path / "b.json").write_text(json.dumps(ROWS[2:5]))
        (tmp_path / "c.jsonl").write_text("")
        files = [tmp_path / name for name in ("a.jsonl", "b.json", "c.jsonl")]
        report = convert(ConvertRequest(files, to))
        dataset = SampleDataset(to)
        assert report.rows_out == len(dataset) == 5
        assert [dataset.location(index).row for index in range(5)] == [1, 2, 1, 2, 3]
        assert dataset.location(4).file.endswith("b.json")

    def test_every_file_has_its_own_columns(self, tmp_path: Path, to: Path) -> None:
        write_jsonl(tmp_path / "a.jsonl", [{"question": "a", "answer": "b"}])
        write_jsonl(tmp_path / "b.jsonl", [{"prompt": "c", "response": "d", "question": "e"}])
        convert(ConvertRequest([tmp_path / "*.jsonl"], to))
        dataset = SampleDataset(to)
        assert [(row["prompt"], row["response"]) for row in dataset] == [("a", "b"), ("c", "d")]
        assert dataset[1]["question"] == "e"
        assert dataset.meta["sources"][1]["map"] == {"prompt": "prompt", "response": "response"}

    def test_messages_need_a_template(self, tmp_path: Path, to: Path) -> None:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        path = write_jsonl(tmp_path / "x.jsonl", [{"messages": messages}] * 3)
        with pytest.raises(DataError, match="need a chat template"):
            run(path, to, tokenizer="bytes", on_bad_row="skip")
        assert not to.exists()
        assert run(path, to).rows_out == 3

    def test_the_template_is_recorded(self, source: Path, to: Path, tmp_path: Path) -> None:
        save_tokenizer(chatml(), tmp_path / "tok")
        run(source, to, tokenizer=tmp_path / "tok")
        meta = SampleDataset(to).meta
        assert meta["template"]["applied"]
        assert meta["template"]["text"] == chatml().chat_template
        run(source, to.with_name("none"), tokenizer=tmp_path / "tok", template="none")
        assert not SampleDataset(to.with_name("none")).meta["template"]["applied"]

    def test_preview_reads_the_same_rows(self, source: Path, to: Path) -> None:
        rows = list(preview(ConvertRequest([source], to)))
        assert [row.record.prompt for row in rows] == [row["prompt"] for row in ROWS]
        assert not to.exists()
        with source.open("a") as file:
            file.write("oops\n")
        with pytest.raises(DataError, match="cannot be used"):
            list(preview(ConvertRequest([source], to)))

    def test_progress_is_reported(self, tmp_path: Path, to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("posttune.data.json_rows.BLOCK_BYTES", 1 << 15)
        seen: list[tuple[int, float]] = []
        path = write_jsonl(tmp_path / "x.jsonl", [{"prompt": "p" * 5000, "response": "r"}] * 200)
        run(path, to, progress=lambda rows, share: seen.append((rows, share)))
        assert [rows for rows, _ in seen] == sorted({rows for rows, _ in seen})
        assert seen[-1] == (200, 1.0)
        assert 0 < seen[0][1] < 1


class TestFromPython:
    def test_preference_as_scripts_call_it(self, to: Path) -> None:
        source = SMALL / "formats" / "ultrafeedback_pref.jsonl"
        report = DataConverter(input_path=source, output_path=to, tokenizer_name="bytes").convert(
            prompt_key="prompt", response_key="chosen", reject_key="rejected", max_length=2048
        )
        dataset = SampleDataset(to / "train.bin")
        assert report.rows_out == len(dataset)
        assert dataset.lengths.max() <= 2048
        assert dataset[0]["rejected_ids"][: len(dataset[0]["prompt_ids"])] == dataset[0]["prompt_ids"]

    def test_other_keys(self, to: Path) -> None:
        source = SMALL / "formats" / "gsm8k_test.parquet"
        DataConverter(source, to).convert(prompt_key="question", response_key="answer")
        row = SampleDataset(to)[0]
        assert row["reference"] == row["response"]
        assert row["response"].endswith("#### 18")


@pytest.mark.slow
def test_all_of_gsm8k(tmp_path: Path) -> None:
    need(SHARED / "gsm8k")
    to = tmp_path / "out"
    report = convert(
        ConvertRequest([SHARED / "gsm8k" / "train.jsonl"], to, converter=PluginRef(name="gsm8k"))
    )
    assert (report.rows_in, report.rows_out, report.rejected) == (7473, 7473, [])
    dataset = SampleDataset(to)
    assert all(row["reference"] and "<<" not in row["response"] for row in dataset)


MEMORY = """
import json, resource, sys
from posttune.data.conversion import ConvertRequest, convert
count, source, to = int(sys.argv[1]), sys.argv[2], sys.argv[3]
with open(source, "w") as file:
    for n in range(count):
        file.write(json.dumps({"prompt": f"question {n} " + "p" * 200, "response": "r" * 300}) + "\\n")
convert(ConvertRequest([source], to))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    peaks = []
    for count in (2_000, 30_000):
        arguments = [str(count), str(tmp_path / f"{count}.jsonl"), str(tmp_path / f"{count}")]
        out = subprocess.run(
            [sys.executable, "-c", MEMORY, *arguments], capture_output=True, text=True, check=True
        )
        peaks.append(int(out.stdout))
    assert peaks[1] - peaks[0] < 12_000  # KiB; the rows themselves are 16 MiB
