from __future__ import annotations

import bz2
import codecs
import datetime
import json
import lzma
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_files import rows_of, run, write_gzip, write_jsonl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from posttune.data.reading import expand, open_source
from posttune.errors import DataError
from posttune.types import BadRow, SourceRow

TWO = b'{"prompt": "a", "response": "b"}\n{"prompt": "c", "response": "d"}\n'
ROWS = [{"prompt": "a", "response": "b"}, {"prompt": "c", "response": "d"}]


def read(path: Path) -> list[SourceRow | BadRow]:
    with open_source(path) as source:
        return list(source.rows())


def good(path: Path) -> list[dict[str, Any]]:
    return [dict(row.data) for row in read(path) if isinstance(row, SourceRow)]


def bad(path: Path) -> list[tuple[int, str]]:
    return [(row.location.row, row.reason) for row in read(path) if isinstance(row, BadRow)]


class TestJsonLines:
    @pytest.mark.parametrize(
        "data",
        [
            TWO,
            TWO.rstrip(),
            TWO.replace(b"\n", b"\r\n"),
            codecs.BOM_UTF8 + TWO,
            TWO.decode().encode("utf-16"),
            codecs.BOM_UTF16_BE + TWO.decode().encode("utf-16-be"),
            TWO.decode().encode("utf-16-le"),
            TWO.decode().encode("utf-16-be"),
            TWO.decode().encode("utf-32"),
        ],
    )
    def test_encodings_and_line_ends(self, data: bytes, tmp_path: Path) -> None:
        path = tmp_path / "x.jsonl"
        path.write_bytes(data)
        assert good(path) == ROWS

    def test_rows_are_physical_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "x.jsonl"
        path.write_bytes(b"\n" + TWO + b"\n{oops\n[1]\n" + TWO)
        rows = read(path)
        assert [row.location.row for row in rows] == [2, 3, 5, 6, 7, 8]
        assert bad(path)[1] == (6, "not an object but a list")

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            (b'{"a": 1}{"a": 2}', "Extra data"),
            (b'{"a": "\xe9"}', "invalid UTF-8 at byte 8"),
            (b"{'a': 1}", "JSON syntax"),
            (b'{"a": 1,}', "JSON syntax"),
            (b'{"a": 1', "JSON syntax"),
            (b'{"a": ' + b"9" * 5000 + b"}", "integer too long"),
            (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nesting too deep"),
            (b"prompt,response", "JSON syntax"),
        ],
    )
    def test_bad_lines(self, line: bytes, reason: str, tmp_path: Path) -> None:
        path = tmp_path / "x.jsonl"
        path.write_bytes(TWO + line + b"\n" + TWO)
        ((row, found),) = bad(path)
        assert row == 3
        assert reason in found
        assert len(good(path)) == 4

    def test_one_object_over_several_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "x.json"
        path.write_text(json.dumps({"data": ROWS}, indent=1))
        with pytest.raises(DataError, match="line 1: one JSON object spreads over several lines"):
            read(path)

    def test_duplicate_keys_are_counted(self, tmp_path: Path) -> None:
        path = tmp_path / "x.jsonl"
        path.write_text('{"prompt": "a", "prompt": "b", "response": "c"}\n')
        report = run(path, tmp_path / "out")
        assert report.warnings == [{"code": "duplicate_keys", "count": 1}]


class TestJsonArray:
    @pytest.mark.parametrize("indent", [None, 1])
    def test_arrays(self, indent: int | None, tmp_path: Path) -> None:
        path = tmp_path / "x.jsonl"
        path.write_text("\ufeff \n" + json.dumps(ROWS, indent=indent) + "\n")
        assert good(path) == ROWS
        assert [row.location.row for row in read(path)] == [1, 2]

    def test_larger_than_any_buffer(self, tmp_path: Path) -> None:
        rows = [{"n": number, "text": 'é😀 \\"' * (number * 97 % 5000)} for number in range(60)]
        path = tmp_path / "x.json"
        path.write_text(json.dumps(rows, ensure_ascii=False), "utf-8")
        assert good(path) == rows

    @pytest.mark.parametrize("data", ["[]", "[ ]\n"])
    def test_empty(self, data: str, tmp_path: Path) -> None:
        path = tmp_path / "x.json"
        path.write_text(data)
        with pytest.raises(DataError, match="no rows"):
            run(path, tmp_path / "out")

    @pytest.mark.parametrize(
        ("data", "place", "what"),
        [
            ('[\n{"a": 1},\n{"a" 2}\n]', "line 3, column 6", "Expecting ':'"),
            ('[\n{"a": 1},\n]', "line 3, column 1", "Expecting value"),
            ('[{"a": 1}\n{"a": 2}]', "line 2, column 1", "expected ','"),
            ('[{"a": 1},\n{"a": 2}', "line 2", "the file ends here"),
            ('[{"a": "cut', "line 1", "Unterminated string"),
            ('[{"a": 1}]\n[{"a": 2}]', "line 2, column 1", "more data after the end"),
            ('[{"a": ' + "9" * 5000 + "}]", "line 1", "integer too long"),
            ('[{"a": ' + "[" * 100_000 + "]" * 100_000 + "}]", "line 1", "nesting too deep"),
        ],
    )
    def test_syntax_errors_name_the_place(self, data: str, place: str, what: str, tmp_path: Path) -> None:
        path = tmp_path / "x.json"
        path.write_text(data)
        with pytest.raises(DataError) as caught:
            read(path)
        assert place in str(caught.value)
        assert what in str(caught.value)

    def test_elements_that_are_no_objects(self, tmp_path: Path) -> None:
        path = tmp_path / "x.json"
        path.write_text('[{"a": 1}, 5, null]')
        assert bad(path) == [(2, "not an object but a number"), (3, "not an object but null")]

    def test_a_list_of_scalars_is_no_array_of_rows(self, tmp_path: Path) -> None:
        path = tmp_path / "x.json"
        path.write_text("[1, 2]")
        assert bad(path) == [(1, "not an object but a list")]


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "none": bytes,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}


class TestCompression:
    @pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
    @pytest.mark.parametrize("codec", ["none", "gzip", "bzip2", "xz", "zstd", "lz4"])
    def test_by_content(self, codec: str, name: str, tmp_path: Path) -> None:
        path = tmp_path / name
        data = TWO * 5000
        if codec == "gzip":
            write_gzip(path, data)
        elif codec in ("zstd", "lz4"):
            with pa.CompressedOutputStream(str(path), codec) as sink:
                sink.write(data)
        else:
            path.write_bytes(PACKERS[codec](data))
        assert good(path) == ROWS * 5000

    @pytest.mark.parametrize("codec", ["gzip", "bzip2", "xz", "zstd"])
    def test_cut_off(self, codec: str, tmp_path: Path) -> None:
        path = tmp_path / "x"
        data = b"".join(b'{"prompt": "%d", "response": "b"}\n' % (n * n * 7919) for n in range(9000))
        if codec == "zstd":
            with pa.CompressedOutputStream(str(path), codec) as sink:
                sink.write(data)
        else:
            write_gzip(path, data) if codec == "gzip" else path.write_bytes(PACKERS[codec](data))
        path.write_bytes(path.read_bytes()[:-4000])
        with pytest.raises(DataError, match=r"ends too early|is damaged|JSON syntax"):
            run(path, tmp_path / "out")

    def test_compressed_parquet(self, tmp_path: Path) -> None:
        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "plain")
        path = write_gzip(tmp_path / "x.gz", (tmp_path / "plain").read_bytes())
        assert good(path) == ROWS


class TestTables:
    def write(self, table: pa.Table, path: Path) -> Path:
        pq.write_table(table, path)
        return path

    @pytest.mark.parametrize(
        "kind",
        [
            pa.string(),
            pa.large_string(),
            pa.string_view(),
            pa.dictionary(pa.int8(), pa.string()),
            pa.binary(),
            pa.large_binary(),
        ],
    )
    def test_text_in_every_encoding(self, kind: pa.DataType, tmp_path: Path) -> None:
        texts = pa.array(["a", "ü", "a"]).cast(kind)
        path = tmp_path / "x.arrow"
        with pa.ipc.new_file(str(path), pa.schema([("prompt", kind)])) as writer:
            writer.write_batch(pa.record_batch([texts], names=["prompt"]))
        assert [row["prompt"] for row in rows_of(path, tmp_path / "out")] == ["a", "ü", "a"]

    def test_other_columns_keep_their_values(self, tmp_path: Path) -> None:
        moment = datetime.datetime(2024, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
        table = pa.table(
            {
                "prompt": ["a"],
                "date": [moment.date()],
                "big": pa.array([2**63], pa.uint64()),
                "price": [Decimal("1.50")],
                "blob": [b"\xff\x00"],
                "pairs": pa.array([[("k", "v")]], pa.map_(pa.string(), pa.string())),
                "nested": [{"list": [{"x": None}]}],
                "nano": pa.array([1], pa.timestamp("ns")),
                "took": [datetime.timedelta(seconds=1)],
                "half": pa.array([float("nan")], pa.float64()),
            }
        )
        (row,) = rows_of(self.write(table, tmp_path / "x"), tmp_path / "out")
        assert row["date"] == "2024-01-02"
        assert row["big"] == 2**63
        assert row["price"] == "1.50"
        assert row["blob"] == "/wA="
        assert row["pairs"] == {"k": "v"}
        assert row["nested"] == {"list": [{"x": None}]}
        assert row["nano"] == "1970-01-01 00:00:00.000000001"
        assert row["took"] == "0:00:01"
        assert row["half"] is None

    def test_text_that_is_no_utf8_is_a_bad_row(self, tmp_path: Path) -> None:
        raw = pa.array([b"ok", b"\xff\xfe", b"fine"]).view(pa.string())
        path = tmp_path / "x.arrow"
        with pa.ipc.new_stream(str(path), pa.schema([("prompt", pa.string())])) as writer:
            writer.write_batch(pa.record_batch([raw], names=["prompt"]))
        assert bad(path) == [(2, "invalid UTF-8 in column 'prompt' at byte 1")]
        assert good(path) == [{"prompt": "ok"}, {"prompt": "fine"}]

    def test_two_columns_of_one_name(self, tmp_path: Path) -> None:
        path = tmp_path / "x.arrow"
        batch = pa.record_batch([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
        with pa.ipc.new_stream(str(path), batch.schema) as writer:
            writer.write_batch(batch)
        with pytest.raises(DataError, match="more than one column 'prompt'"):
            read(path)

    def test_no_rows(self, tmp_path: Path) -> None:
        path = self.write(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "x")
        with pytest.raises(DataError, match="no rows"):
            run(path, tmp_path / "out")

    def test_a_stream_that_is_cut_off(self, tmp_path: Path) -> None:
        path = tmp_path / "x.arrow"
        with pa.ipc.new_stream(str(path), pa.schema([("prompt", pa.string())])) as writer:
            writer.write_table(pa.table({"prompt": ["abc" * 100] * 50}))
        path.write_bytes(path.read_bytes()[:-500])
        with pytest.raises(DataError, match="is damaged"):
            run(path, tmp_path / "out")


class TestRefusals:
    def test_foreign_formats(self, tmp_path: Path) -> None:
        (tmp_path / "p").write_bytes(pickle.dumps(ROWS))
        with zipfile.ZipFile(tmp_path / "z", "w") as archive:
            archive.writestr("a.jsonl", TWO)
        (tmp_path / "a.jsonl").write_bytes(TWO)
        with tarfile.open(tmp_path / "t", "w:gz") as tar:
            tar.add(tmp_path / "a.jsonl", "a.jsonl")
        for name, what in (("p", "pickle"), ("z", "zip"), ("t", "tar archive")):
            with pytest.raises(DataError, match=what):
                read(tmp_path / name)

    def test_paths(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="no such file"):
            read(tmp_path / "missing.jsonl")
        with pytest.raises(DataError, match="is a folder"):
            read(tmp_path)
        with pytest.raises(DataError, match="without data files"):
            expand([tmp_path])
        with pytest.raises(DataError, match="no file matches"):
            expand([tmp_path / "*.jsonl"])
        with pytest.raises(DataError, match="no source file"):
            expand([])

    def test_a_converted_dataset_is_no_source(self, tmp_path: Path) -> None:
        write_jsonl(tmp_path / "x.jsonl", ROWS)
        run(tmp_path / "x.jsonl", tmp_path / "out")
        with pytest.raises(DataError, match="converted dataset already"):
            expand([tmp_path / "out"])


def test_folders_patterns_and_several_files(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl.gz", "deep/c.json", "README.md", ".hidden.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(TWO)
    names = [path.name for path in expand([tmp_path])]
    assert names == ["a.jsonl.gz", "b.jsonl", "c.json"]
    assert [path.name for path in expand([tmp_path / "*.jsonl"])] == ["b.jsonl"]
    assert expand([tmp_path / "x", "y"]) == [tmp_path / "x", Path("y")]


ANY = st.text(min_size=1, max_size=20).filter(str.strip)
ROW = st.fixed_dictionaries({"prompt": ANY, "response": ANY, "extra": st.text(max_size=20)})


@pytest.mark.parametrize("kind", ["jsonl", "array", "parquet", "file", "stream"])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(ROW, min_size=1, max_size=40))
def test_what_comes_out_is_what_went_in(kind: str, rows: list[dict[str, str]], tmp_path: Path) -> None:
    path = tmp_path / "x"
    if kind == "jsonl":
        write_jsonl(path, rows)
    elif kind == "array":
        path.write_text(json.dumps(rows, ensure_ascii=False), "utf-8")
    else:
        table = pa.Table.from_pylist(rows)
        if kind == "parquet":
            pq.write_table(table, path)
        else:
            make = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
            with make(str(path), table.schema) as writer:
                writer.write_table(table)
    found = rows_of(path, tmp_path / "out", overwrite=True)
    assert [{name: row[name] for name in rows[0]} for row in found] == rows
