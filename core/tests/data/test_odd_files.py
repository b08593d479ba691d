"""Odd files, made on the spot: what is read from each, or what its refusal says."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_files import rows_of, run, write_jsonl
from posttune.cli.main import main
from posttune.errors import DataError, ModelError

ROW = {"prompt": "p", "response": "r"}
TWO = [ROW, {"prompt": "q", "response": "s"}]
TABLE = pa.table({"prompt": ["p", "q"], "response": ["r", "s"]})
JUNK = random.Random(1).randbytes(3000)


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def ipc(table: pa.Table, kind: Any = pa.ipc.new_stream) -> bytes:
    sink = io.BytesIO()
    with kind(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


def chat(*messages: Any) -> bytes:
    return lines({"messages": list(messages)})


def shared(*turns: tuple[str, str]) -> bytes:
    return lines({"conversations": [{"from": who, "value": text} for who, text in turns]})


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def says(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


@dataclass(frozen=True)
class Case:
    """A file, and what is expected of it: rows (each may have more keys) or a part of the refusal."""

    id: str
    data: bytes
    expect: list[dict[str, Any]] | str
    file: str = "x.jsonl"
    options: dict[str, Any] = field(default_factory=dict)


GOOD = lines(*TWO)
WITH = pa.table({"prompt": ["p"], "response": ["r"]}).append_column
CASES = [
    # Text: marks, encodings, line ends
    Case("utf-8 mark", b"\xef\xbb\xbf" + GOOD, TWO),
    Case("utf-16 with a mark", GOOD.decode().encode("utf-16"), TWO),
    Case("utf-16-be with a mark", b"\xfe\xff" + GOOD.decode().encode("utf-16-be"), TWO),
    Case("utf-16 without a mark", GOOD.decode().encode("utf-16-le"), TWO),
    Case("utf-32", GOOD.decode().encode("utf-32"), TWO),
    Case("CRLF", GOOD.replace(b"\n", b"\r\n"), TWO),
    Case("CR alone", GOOD.replace(b"\n", b"\r"), "Extra data (column 34)"),
    Case("no newline at the end", GOOD[:-1], TWO),
    Case("only a mark", b"\xef\xbb\xbf", "no rows"),
    Case("only blank lines", b"\n \n\n", "no rows"),
    Case("empty", b"", "no rows"),
    # JSON
    Case("a key twice", b'{"prompt":"a","prompt":"b","response":"r"}\n', [{"prompt": "b"}]),
    Case("an integer of 5000 digits", b'{"prompt":"a","n":' + b"9" * 5000 + b"}\n", "integer too long"),
    Case("NaN as text", b'{"prompt":NaN,"response":"r"}\n', "prompt is null"),
    Case("NaN in a list", b'{"prompt":"a","x":[NaN,-Infinity,1]}\n', [{"x": [None, None, 1]}]),
    Case("a number beyond float", b'{"prompt":"a","x":1e999}\n', [{"x": None}]),
    Case("a lone surrogate", b'{"prompt":"a\\ud800b"}\n', "lone surrogate in prompt at character 2"),
    Case("an unknown escape", b'{"prompt":"a\\xb"}\n', "Invalid \\escape"),
    Case("a raw tab", b'{"prompt":"a\tb"}\n', [{"prompt": "a\tb"}]),
    Case(
        "nesting beyond reason",
        b'{"prompt":"a","x":' + b"[" * 2000 + b"]" * 2000 + b"}\n",
        "nesting too deep",
    ),
    Case("two objects in a line", b'{"prompt":"a"}{"prompt":"b"}\n', "Extra data"),
    Case("an object over several lines", json.dumps(ROW, indent=1).encode(), "spreads over several lines"),
    Case("an array of arrays", b'[["a","b"]]', "not an object but a list"),
    Case("an array of nothing", b"[]", "no rows"),
    Case("an array, then more", b'[{"prompt":"a"}] x', "line 1, column 18: JSON syntax: more data after"),
    Case("an array with a last comma", b'[{"prompt":"a"},]', "line 1, column 17: JSON syntax"),
    Case("an array without its end", b'[{"prompt":"a"}', "the file ends here"),
    Case("an array named jsonl", json.dumps(TWO).encode(), TWO),
    Case("rows below a key", json.dumps({"data": TWO}).encode(), "columns are data", "x.json"),
    Case("a dict as Python prints it", b"{'prompt': 'a'}\n", "Expecting property name"),
    Case("scalars", b"5\n6\n", "not an object but a number"),
    Case("objects without a key", b"{}\n{}\n", "columns are none"),
    Case("a line of 5 MB", lines({"prompt": "x" * 5_000_000}), [{"prompt": "x" * 5_000_000}]),
    Case("3000 columns", lines({**ROW, **{f"c{n}": n for n in range(3000)}}), [{"c2999": 2999, **ROW}]),
    Case("a column without a name", lines({**ROW, "": "x"}), [{"": "x", **ROW}]),
    Case("our own names", lines({**ROW, "input_ids": [1]}), [{"source.input_ids": [1], **ROW}]),
    # What is no text
    Case("a number as prompt", lines({"prompt": 5}), [{"prompt": "5"}]),
    Case("a bool as prompt", lines({"prompt": True}), "prompt is a bool, not text"),
    Case("a list as prompt", lines({"prompt": [["a"]]}), "prompt is a list, not text"),
    Case("an object as prompt", lines({"prompt": {"a": 1}}), "prompt is an object, not text"),
    Case("a blank prompt", lines({"prompt": "\u00a0\n"}), "blank prompt"),
    Case("an object as reference", lines({**ROW, "reference": {"a": 1}}), "reference is an object"),
    Case("several references", lines({**ROW, "reference": ["a", "b"]}), [{"reference": ["a", "b"]}]),
    Case("a number as reference", lines({**ROW, "reference": 3.0}), [{"reference": "3.0"}]),
    # Files that are something else
    Case("junk named parquet", JUNK, "holds none of the formats that are read", "x.parquet"),
    Case("junk named gz", JUNK, "holds none of the formats that are read", "x.jsonl.gz"),
    Case("junk", JUNK, "holds none of the formats that are read"),
    Case(
        "a pointer of Git LFS", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\n", "git lfs pull"
    ),
    Case("a web page", b"<!DOCTYPE html><html><body>404</body></html>", "web page", "x.parquet"),
    Case("a pickle", b"\x80\x04\x95" + bytes(50), "a pickle"),
    Case("YAML", b"prompt: a\nresponse: b\n", "check what the file holds"),
    # Compression
    Case("gzip in two members", gzip.compress(lines(TWO[0])) + gzip.compress(lines(TWO[1])), TWO),
    Case("gzip with zeros behind", gzip.compress(GOOD) + bytes(100), TWO),
    Case("gzip with junk behind", gzip.compress(GOOD) + b"junk!", "is damaged"),
    Case("gzip cut off", gzip.compress(GOOD * 100)[:-20], "ends too early"),
    Case("gzip of nothing", gzip.compress(b""), "no rows"),
    Case("gzip of gzip", gzip.compress(gzip.compress(GOOD)), "compressed twice"),
    Case("gzip's head and junk", b"\x1f\x8b\x08\x00" + JUNK, "is damaged"),
    Case("zstd in two frames", zstd(lines(TWO[0])) + zstd(lines(TWO[1])), TWO),
    Case("zstd behind a frame to skip", b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + zstd(GOOD), TWO),
    Case("zstd cut off", zstd(GOOD * 200)[:-5], "is damaged: Truncated"),
    Case("zstd with junk behind", zstd(GOOD) + b"junk", "is damaged"),
    Case("bzip2 in two streams", bz2.compress(lines(TWO[0])) + bz2.compress(lines(TWO[1])), TWO),
    Case("xz in two streams", lzma.compress(lines(TWO[0])) + lzma.compress(lines(TWO[1])), TWO),
    Case("lz4's head and junk", b"\x04\x22\x4d\x18" + JUNK, "is damaged", "x.lz4"),
    # CSV
    Case("csv named jsonl", b"prompt,response\np,r\n", [ROW]),
    Case(
        "csv with quotes",
        b'prompt,response\n"a ""q"", x","b\nc"\n',
        [{"prompt": 'a "q", x', "response": "b\nc"}],
    ),
    Case(
        "csv with a quote inside",
        b'prompt,response\na"b,c"d\n',
        [{"prompt": 'a"b', "response": 'c"d'}],
        "x.csv",
    ),
    Case("csv with an open quote", b'prompt,response\n"a,b\nc,d\n', "never closed", "x.csv"),
    Case(
        "csv, a short record",
        b"prompt,response\na,b\nc\n",
        "x.csv:2: 1 fields where the header names 2",
        "x.csv",
    ),
    Case("csv, a long record", b"prompt,response\na,b,c\n", "3 fields where the header names 2", "x.csv"),
    Case("csv, only a header", b"prompt,response\n", "no rows", "x.csv"),
    Case("csv, only a header, no newline", b"prompt,response", "no rows", "x.csv"),
    Case("csv, two columns of a name", b"prompt,prompt\na,b\n", "more than one column 'prompt'", "x.csv"),
    Case("csv, a column without a name", b"prompt,,response\na,b,c\n", "a column without a name", "x.csv"),
    Case("csv with blank lines", b"prompt,response\n\np,r\n\n", [ROW], "x.csv"),
    Case("csv with spaces in the header", b"prompt , response\np,r\n", [ROW], "x.csv"),
    Case("csv with a mark", b"\xef\xbb\xbfprompt,response\np,r\n", [ROW], "x.csv"),
    Case("csv in utf-16", "prompt,response\np,r\n".encode("utf-16"), [ROW], "x.csv"),
    Case(
        "csv in Latin-1", "prompt,response\ncaf\xe9,b\n".encode("latin-1"), "invalid UTF-8 in column", "x.csv"
    ),
    Case("csv, CR alone", b"prompt,response\rp,r\r", [ROW], "x.csv"),
    Case("csv, an empty field", b"prompt,response\n,b\n", "empty prompt", "x.csv"),
    # Parquet and Arrow
    Case("parquet, no row groups", parquet(TABLE.slice(0, 0)), "no rows", "x.parquet"),
    Case("parquet, no columns", parquet(pa.table({})), "no rows", "x.parquet"),
    Case("parquet, many row groups", parquet(TABLE, row_group_size=1), TWO, "x.csv"),
    Case("parquet, compressed again", gzip.compress(parquet(TABLE)), TWO),
    Case("parquet cut off", parquet(TABLE)[:-6], "is damaged", "x.parquet"),
    Case("parquet's magic and junk", b"PAR1" + JUNK + b"PAR1", "is damaged", "x.parquet"),
    Case("parquet's magic alone", b"PAR1", "is damaged", "x.parquet"),
    Case(
        "dictionary",
        parquet(pa.table([column.dictionary_encode() for column in TABLE.columns], TABLE.column_names)),
        TWO,
    ),
    Case(
        "large strings",
        parquet(TABLE.cast(pa.schema([(n, pa.large_string()) for n in TABLE.column_names]))),
        TWO,
    ),
    Case(
        "string views", ipc(TABLE.cast(pa.schema([(n, pa.string_view()) for n in TABLE.column_names]))), TWO
    ),
    Case(
        "runs",
        ipc(pa.table({"prompt": pa.RunEndEncodedArray.from_arrays([2], ["p"])})),
        [{"prompt": "p"}] * 2,
    ),
    Case("bytes as text", ipc(pa.table({"prompt": pa.array([b"p"])})), [{"prompt": "p"}]),
    Case(
        "nothing but null",
        ipc(pa.table({"prompt": pa.nulls(2), "response": ["r", "s"]})),
        "prompt is all null",
    ),
    Case(
        "a struct in a struct",
        parquet(pa.table({"d": [{"q": {"t": "p"}}]})),
        [{"prompt": "p"}],
        options={"map": {"prompt": "d.q.t"}},
    ),
    Case(
        "a union",
        ipc(WITH("t", pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])]))),
        [{"t": 1, **ROW}],
    ),
    Case("half precision", ipc(WITH("t", pa.array([1.5], pa.float16()))), [{"t": 1.5, **ROW}]),
    Case("a time out of range", ipc(WITH("t", pa.array([2**62], pa.timestamp("s")))), [ROW]),
    Case(
        "an image",
        ipc(WITH("i", pa.array([{"bytes": b"\x89PNG\xff"}]))),
        [{"i": {"bytes": "iVBOR/8="}, **ROW}],
    ),
    Case("arrow file cut off", ipc(TABLE, pa.ipc.new_file)[:-30], "is damaged", "x.arrow"),
    Case("arrow stream cut off", ipc(TABLE)[:-60], "is damaged", "x.arrow"),
    Case("arrow stream, only its schema", ipc(TABLE.slice(0, 0)), "no rows", "x.arrow"),
    Case("arrow's magic and junk", b"ARROW1\0\0" + JUNK, "is damaged", "x.arrow"),
    Case("a stream's head and junk", b"\xff\xff\xff\xff\xff\xff\xff\x7f" + JUNK, "is damaged", "x.arrow"),
    # Conversations
    Case(
        "an unknown role",
        chat(user("a"), {"role": "narrator", "content": "x"}, says("b")),
        "unknown role narrator in message 2",
    ),
    Case("no role", chat({"content": "x"}, says("b")), "unknown role None in message 1"),
    Case(
        "roles in capitals",
        chat({"role": "User", "content": "a"}, {"role": "ASSISTANT", "content": "b"}),
        [{"messages": [user("a"), says("b")]}],
    ),
    Case(
        "an image part",
        chat(user([{"type": "text", "text": "x"}, {"type": "image_url"}]), says("b")),
        "image part",
    ),
    Case(
        "parts that are texts", chat(user(["x", "y"]), says("b")), [{"messages": [user("x\ny"), says("b")]}]
    ),
    Case("no content", chat(user(None), says("b")), "content of message 1 (user) is null"),
    Case(
        "tool calls without content",
        chat(
            user("a"), {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
        ),
        [{"prompt": "a"}],
    ),
    Case(
        "tool calls that are none",
        chat(user("a"), {**says(""), "tool_calls": "f"}),
        "tool_calls of message 2",
    ),
    Case("no messages", chat(), "empty messages"),
    Case("texts for messages", lines({"messages": ["a", "b"]}), "message 1 is no object"),
    Case("the user's turn last", chat(user("a")), "no final assistant turn"),
    Case("sharegpt, the answer first", shared(("gpt", "a"), ("human", "b")), "no final assistant turn"),
    Case("sharegpt, an unknown speaker", shared(("alien", "a"), ("gpt", "b")), "unknown role alien"),
    Case(
        "sharegpt, no value",
        lines({"conversations": [{"from": "human"}, {"from": "gpt", "value": "b"}]}),
        "is null",
    ),
    # Converters
    Case(
        "an equal pair",
        lines({"prompt": "p", "chosen": "a", "rejected": "a"}),
        [{"chosen": "a", "rejected": "a"}],
    ),
    Case("half a pair", lines({"prompt": "p", "chosen": "a"}), "a column for chosen, but none for rejected"),
    Case(
        "pairs of other prompts",
        lines({"chosen": [user("a"), says("b")], "rejected": [user("x"), says("c")]}),
        "answer different conversations",
    ),
    Case(
        "math without a box",
        lines({"problem": "p", "solution": "1"}),
        "no \\boxed",
        options={"converter": "math"},
    ),
    Case(
        "math with an open box",
        lines({"problem": "p", "solution": "\\boxed{1"}),
        "no \\boxed",
        options={"converter": "math"},
    ),
    Case(
        "math with two boxes",
        lines({"problem": "p", "solution": "\\boxed{1} \\boxed{2}"}),
        [{"reference": "2"}],
        options={"converter": "math"},
    ),
    Case(
        "gsm8k without a mark",
        lines({"question": "p", "answer": "1"}),
        "no '####' line",
        options={"converter": "gsm8k"},
    ),
    Case(
        "gsm8k with nothing behind",
        lines({"question": "p", "answer": "1\n#### "}),
        "no '####' line",
        options={"converter": "gsm8k"},
    ),
    Case("alpaca without input", lines({"instruction": "p", "input": None, "output": "r"}), [ROW]),
    # Maps
    Case(
        "a place in a list",
        lines({"a": {"b": [{"c": "p"}]}}),
        [{"prompt": "p"}],
        options={"map": {"prompt": "a.b.0.c"}},
    ),
    Case("a dot in a name", lines({"a.b": "p"}), [{"prompt": "p"}], options={"map": {"prompt": "a.b"}}),
    Case(
        "no such column",
        lines(ROW),
        "no column 'promt' for prompt; did you mean 'prompt'",
        options={"map": {"prompt": "promt"}},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_odd_file(case: Case, tmp_path: Path) -> None:
    path, to = tmp_path / case.file, tmp_path / "out"
    path.write_bytes(case.data)
    if isinstance(case.expect, list):
        rows = rows_of(path, to, **case.options)
        assert [
            {key: row.get(key) for key in known} for row, known in zip(rows, case.expect, strict=True)
        ] == case.expect
        return
    with pytest.raises(DataError) as caught:
        run(path, to, **case.options)
    assert case.expect in str(caught.value)
    assert case.file in str(caught.value)
    assert "next:" in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == [case.file]  # nothing half written


class TestPlaces:
    def test_mixed_schemas_over_several_files(self, tmp_path: Path) -> None:
        write_jsonl(tmp_path / "a.jsonl", [ROW])
        write_jsonl(tmp_path / "b.jsonl", [{"question": "q", "answer": "s", "level": 3}])
        (tmp_path / "c.parquet").write_bytes(parquet(TABLE))
        rows = rows_of(tmp_path / "*.*", tmp_path / "out")
        assert [row["prompt"] for row in rows] == ["p", "q", "p", "q"]
        assert [row.get("level") for row in rows] == [None, 3, None, None]

    def test_nothing_matches(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="no file matches the pattern"):
            run(tmp_path / "*.jsonl", tmp_path / "out")

    def test_a_folder_with_what_is_hidden_or_made(self, tmp_path: Path) -> None:
        folder = tmp_path / "data"
        for place in (".git", "sub", "."):
            (folder / place).mkdir(parents=True, exist_ok=True)
            write_jsonl(folder / place / "x.jsonl", [ROW])
        write_jsonl(folder / ".hidden.jsonl", [ROW])
        assert len(rows_of(folder, folder / "made")) == 2
        assert len(rows_of(folder, tmp_path / "again")) == 2  # not meta.json of the dataset in it

    def test_links_in_a_circle(self, tmp_path: Path) -> None:
        for name, target in (("a", "b"), ("b", "a")):
            (tmp_path / name).symlink_to(target)
        with pytest.raises(DataError, match="a: cannot be opened: Too many levels of symbolic links"):
            run(tmp_path / "a", tmp_path / "out")
        folder = tmp_path / "folder"
        folder.mkdir()
        (folder / "self").symlink_to("../folder")
        write_jsonl(folder / "x.jsonl", [ROW])
        assert len(rows_of(folder, tmp_path / "out")) == 1

    def test_a_path_through_a_file(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "x.jsonl", [ROW])
        with pytest.raises(DataError, match="cannot be opened: Not a directory"):
            run(path / "y.jsonl", tmp_path / "out")

    def test_a_destination_below_a_file(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "x.jsonl", [ROW])
        with pytest.raises(DataError, match=r"x\.jsonl: is a file, so that no folder can be in it"):
            run(path, path / "a" / "b")

    def test_a_pipe(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(DataError, match="is a pipe, not a file"):
            run(tmp_path / "pipe", tmp_path / "out")

    def test_a_folder_without_a_tokenizer(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "x.jsonl", [ROW])
        with pytest.raises(ModelError) as caught:
            run(path, tmp_path / "out", tokenizer=tmp_path)
        assert "the folder holds no tokenizer" in str(caught.value)
        assert "model:" not in str(caught.value)  # a key that a conversion does not have


class TestOverwrite:
    def test_what_lies_beside_is_not_removed(self, tmp_path: Path) -> None:
        path, to = write_jsonl(tmp_path / "x.jsonl", [ROW]), tmp_path / "out"
        run(path, to, tokenizer="bytes")
        (to / "notes.txt").write_text("mine")
        with pytest.raises(DataError, match=r"no part of the dataset: notes\.txt"):
            run(path, to, overwrite=True)
        assert (to / "notes.txt").read_text() == "mine"
        (to / "notes.txt").unlink()
        assert run(path, to, overwrite=True).rows_out == 1
        assert not (to / "tokenizer.json").exists()

    def test_a_link_stays_one(self, tmp_path: Path) -> None:
        path, link = write_jsonl(tmp_path / "x.jsonl", [ROW]), tmp_path / "link"
        run(path, tmp_path / "real")
        link.symlink_to("real")
        run(path, link, tokenizer="bytes", overwrite=True)
        assert link.is_symlink()
        assert (tmp_path / "real" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema":', "meta.json: cannot be read"),
        ('{"schema": 1}', "meta.json: is damaged: it lacks fingerprint"),
    ],
)
def test_inspect_says_that_a_dataset_is_damaged(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(write_jsonl(tmp_path / "x.jsonl", [ROW]), tmp_path / "out")
    (tmp_path / "out" / "meta.json").write_text(text)
    assert main(["data", "inspect", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
