"""``sharegpt``, ``alpaca``, ``text`` and ``math``, and CSV as a source."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from data_files import SHARED, need, rows_of, run, write_jsonl
from posttune.config.models import PluginRef
from posttune.data.conversion import ConvertRequest, convert
from posttune.data.converters.math import boxed
from posttune.data.csv_rows import sniff_csv
from posttune.data.dataset import SampleDataset
from posttune.data.records import RowError
from posttune.errors import DataError


def made(
    tmp_path: Path, rows: list[dict[str, Any]], converter: str | None, **options: Any
) -> list[dict[str, Any]]:
    return rows_of(write_jsonl(tmp_path / "x.jsonl", rows), tmp_path / "out", converter=converter, **options)


def refused(tmp_path: Path, row: dict[str, Any], converter: str) -> str:
    with pytest.raises(DataError) as caught:
        made(tmp_path, [row], converter)
    return str(caught.value)


class TestShareGPT:
    TURNS: ClassVar = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]

    def test_system_column(self, tmp_path: Path) -> None:
        (row,) = made(tmp_path, [{"conversations": self.TURNS, "system": "Be kind.", "id": 3}], None)
        assert [m["role"] for m in row["messages"]] == ["system", "user", "assistant"]
        assert row["messages"][0]["content"] == "Be kind."
        assert row["id"] == 3

    def test_a_system_turn_of_its_own_wins(self, tmp_path: Path) -> None:
        turns = [{"from": "system", "value": "mine"}, *self.TURNS]
        (row,) = made(tmp_path, [{"conversations": turns, "system": "other"}], "sharegpt")
        assert row["messages"][0]["content"] == "mine"
        assert row["system"] == "other"

    def test_preference(self, tmp_path: Path) -> None:
        pair = {"chosen": {"from": "gpt", "value": "good"}, "rejected": {"from": "gpt", "value": "bad"}}
        (row,) = made(tmp_path, [{"conversations": self.TURNS[:1], **pair}], "sharegpt")
        assert (row["prompt"], row["chosen"], row["rejected"]) == ("hi", "good", "bad")


class TestAlpaca:
    def test_instruction_and_input(self, tmp_path: Path) -> None:
        rows = [
            {"instruction": "Add.", "input": "1 2", "output": "3", "n": 1},
            {"instruction": "Say hi.", "input": "", "output": "hi", "n": 2},
        ]
        first, second = made(tmp_path, rows, None)
        assert (first["prompt"], first["response"], first["n"]) == ("Add.\n\n1 2", "3", 1)
        assert second["prompt"] == "Say hi."
        assert "input" not in first

    def test_dolly(self, tmp_path: Path) -> None:
        dolly = {"instruction": "When?", "context": "In 2001.", "response": "2001", "category": "qa"}
        (row,) = made(tmp_path, [dolly], None)
        assert (row["prompt"], row["response"]) == ("When?\n\nIn 2001.", "2001")
        assert row["category"] == "qa"
        assert "context" not in row

    def test_instances(self, tmp_path: Path) -> None:
        instances = [{"input": "a", "output": "A"}, {"input": "", "output": "B"}]
        found = made(tmp_path, [{"instruction": "Up", "instances": instances}], None)
        assert [(row["prompt"], row["response"]) for row in found] == [("Up\n\na", "A"), ("Up", "B")]

    def test_system_and_history(self, tmp_path: Path) -> None:
        row = {"instruction": "c", "output": "d", "system": "s", "history": [["a", "b"]]}
        (found,) = made(tmp_path, [row], "alpaca")
        assert [m["content"] for m in found["messages"]] == ["s", "a", "b", "c", "d"]

    def test_separator(self, tmp_path: Path) -> None:
        source = write_jsonl(tmp_path / "x.jsonl", [{"instruction": "a", "input": "b", "output": "c"}])
        ref = PluginRef(name="alpaca", options={"separator": " | "})
        report = convert(ConvertRequest([source], tmp_path / "out", ref))
        assert SampleDataset(report.path)[0]["prompt"] == "a | b"

    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            ({"instruction": "", "output": "x"}, "empty prompt"),
            ({"instruction": "a", "output": " "}, "blank response"),
            ({"instruction": "a", "instances": []}, "instances is no list"),
            ({"instruction": "a", "instances": [3]}, "no object"),
            ({"instruction": "a", "output": "b", "history": [["x"]]}, "no pair"),
            ({"instruction": "a", "output": "b", "input": ["x"]}, "input is a list"),
        ],
    )
    def test_bad_rows(self, row: dict[str, Any], reason: str, tmp_path: Path) -> None:
        assert reason in refused(tmp_path, row, "alpaca")


def test_text(tmp_path: Path) -> None:
    first, _ = made(tmp_path, [{"text": "a b", "id": 1}, {"text": "c", "id": 2}], None, tokenizer="bytes")
    assert first["text"] == "a b"
    assert first["prompt_ids"] == []
    assert sum(first["loss_mask"]) == len(first["input_ids"]) - 1  # nothing predicts the first


def test_a_blank_text(tmp_path: Path) -> None:
    assert "blank text" in refused(tmp_path, {"text": " "}, "text")


class TestMath:
    def test_boxed(self, tmp_path: Path) -> None:
        rows = [{"problem": "p", "solution": r"so \boxed{1} or \boxed{\frac{1}{2}}.", "level": 3}]
        (row,) = made(tmp_path, rows, "math")
        assert (row["reference"], row["level"]) == (r"\frac{1}{2}", 3)

    def test_an_answer_column_wins_and_needs_no_solution(self, tmp_path: Path) -> None:
        (row,) = made(tmp_path, [{"problem": "p", "answer": 42}], "math")
        assert row["reference"] == "42"
        assert "response" not in row

    @pytest.mark.parametrize(
        ("solution", "answer"),
        [
            (r"\boxed{a{b}c}", "a{b}c"),
            (r"\fbox{7}", "7"),
            (r"thus $\boxed 5$", "5"),
            (r"\boxed{\{1,2\}}", r"\{1,2\}"),
            (r"\boxed{3} then \boxed{", "3"),
            (r"\boxed { 8 }", "8"),
        ],
    )
    def test_forms(self, solution: str, answer: str) -> None:
        assert boxed(solution) == answer

    def test_without_a_box(self, tmp_path: Path) -> None:
        with pytest.raises(RowError, match="boxed"):
            boxed("nothing")
        assert "boxed" in refused(tmp_path, {"problem": "p", "solution": "42"}, "math")

    def test_math500(self, tmp_path: Path) -> None:
        need(SHARED / "math")
        rows = [json.loads(line) for line in (SHARED / "math" / "math500.jsonl").open(encoding="utf-8")]
        found = made(tmp_path, [{k: row[k] for k in ("problem", "solution")} for row in rows], "math")
        same = sum(row["reference"] == source["answer"] for row, source in zip(found, rows, strict=True))
        assert same >= 0.98 * len(rows)  # the column is written in a slightly different way here and there


class TestCsv:
    ROWS: ClassVar = [
        {"prompt": 'a, "b"\nc', "response": "d\r\ne", "n": "1"},
        {"prompt": "日本 🎉", "response": "ok", "n": ""},
    ]

    def text(self, delimiter: str = ",", end: str = "\r\n") -> str:
        out = io.StringIO(newline="")
        writer = csv.DictWriter(out, ["prompt", "response", "n"], delimiter=delimiter, lineterminator=end)
        writer.writeheader()
        writer.writerows(self.ROWS)
        return out.getvalue()

    @pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
    @pytest.mark.parametrize("name", ["x.csv", "x.data"])
    def test_separators(self, delimiter: str, name: str, tmp_path: Path) -> None:
        (tmp_path / name).write_bytes(self.text(delimiter, "\n").encode())
        assert [dict(row) for row in rows_of(tmp_path / name, tmp_path / "out")] == [
            {**row, "reference": row["response"]} for row in self.ROWS
        ]

    @pytest.mark.parametrize(
        "data",
        [
            lambda text: text.encode(),
            lambda text: codecs.BOM_UTF8 + text.encode(),
            lambda text: text.encode("utf-16"),
            lambda text: gzip.compress(text.encode()),
        ],
    )
    def test_encodings(self, data: Any, tmp_path: Path) -> None:
        (tmp_path / "x.csv").write_bytes(data(self.text()))
        found = rows_of(tmp_path / "x.csv", tmp_path / "out")
        assert [row["prompt"] for row in found] == [row["prompt"] for row in self.ROWS]

    def test_bad_records(self, tmp_path: Path) -> None:
        lines = [b"prompt,response", b"a,b", b"a,b,c", b"\xff,b", b'"a"x,b', b"", b"c,d"]
        (tmp_path / "x.csv").write_bytes(b"\n".join(lines))
        report = run(tmp_path / "x.csv", tmp_path / "out", on_bad_row="skip")
        assert report.rows_out == 2
        assert [(entry["row"], entry["reason"].split(":")[0]) for entry in report.rejected] == [
            (2, "3 fields where the header names 2"),
            (3, "invalid UTF-8 in column 'prompt'"),
            (4, "CSV syntax"),
        ]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('prompt,response\na,"b', "line 2: a field's quotation mark is never closed"),
            ("prompt,prompt\na,b", "more than one column 'prompt'"),
            ("prompt,,response\na,b,c", "column without a name"),
        ],
    )
    def test_refusals(self, text: str, message: str, tmp_path: Path) -> None:
        (tmp_path / "x.csv").write_text(text, "utf-8")
        with pytest.raises(DataError, match=message):
            run(tmp_path / "x.csv", tmp_path / "out")

    @pytest.mark.parametrize(
        "head",
        [
            b'{"a": 1, "b": 2}\n',
            b"[1, 2]\n",
            b"1\n2\n",
            b'"a"\n{"b": 1}',
            b"oops, broken\n{}\n",
            b"",
            b"nan,1\n2,3",
        ],
    )
    def test_what_is_no_csv(self, head: bytes) -> None:
        assert sniff_csv(head, "x.jsonl") is None

    def test_a_field_beyond_the_modules_limit(self, tmp_path: Path) -> None:
        before = csv.field_size_limit()
        (tmp_path / "x.csv").write_text(f"prompt,response\n{'x' * 200_000},b\n", "utf-8")
        assert len(rows_of(tmp_path / "x.csv", tmp_path / "out")[0]["prompt"]) == 200_000
        assert csv.field_size_limit() == before
