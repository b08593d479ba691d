"""What goes in comes out: over every format, in one process or several, however it is decoded."""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_files import run
from hypothesis import given, settings
from hypothesis import strategies as st
from posttune.data.dataset import SampleDataset
from posttune.data.inspect import inspect_dataset
from posttune.errors import DataError, RunError

Rows = list[dict[str, str]]


def random_rows(seed: int, count: int = 1000) -> Rows:
    """Rows of any unicode but lone surrogates, line ends and controls included."""
    draw = random.Random(seed)
    ranges = [
        (0x20, 0x7E),
        (0, 0x1F),
        (0x80, 0x24F),
        (0x2000, 0x206F),
        (0x4E00, 0x4FFF),
        (0x1F300, 0x1F6FF),
        (0, 0x10FFFF),
    ]

    def text() -> str:
        codes = (draw.randint(*draw.choice(ranges)) for _ in range(draw.randint(0, 20)))
        return "x" + "".join(chr(code) for code in codes if not 0xD800 <= code <= 0xDFFF)

    return [{"prompt": text(), "response": text(), "note": text()} for _ in range(count)]


def jsonl(rows: Rows, path: Path) -> None:
    path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())


def array(rows: Rows, path: Path) -> None:
    path.write_text(json.dumps(rows, indent=1), "utf-8")


def packed(rows: Rows, path: Path) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def table_csv(rows: Rows, path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), quoting=csv.QUOTE_ALL)
        writer.writeheader()
        writer.writerows(rows)


def parquet(rows: Rows, path: Path) -> None:
    table = pa.Table.from_pylist(rows)
    kinds = [pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.string()]
    fields = zip(table.schema.names, kinds, strict=True)
    table = table.cast(pa.schema([pa.field(name, kind) for name, kind in fields]))
    pq.write_table(table, path, row_group_size=300, use_dictionary=["note"])


def arrow_file(rows: Rows, path: Path) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=170)


def arrow_stream(rows: Rows, path: Path) -> None:
    table = pa.Table.from_pylist(rows)
    encoded = table.set_column(0, "prompt", table["prompt"].dictionary_encode())
    with pa.ipc.new_stream(str(path), encoded.schema) as writer:
        writer.write_table(encoded, max_chunksize=170)


WRITERS = [jsonl, array, packed, table_csv, parquet, arrow_file, arrow_stream]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
@settings(deadline=None, max_examples=1)
@given(seed=st.integers(0, 2**32))
def test_a_thousand_random_rows(
    tmp_path_factory: pytest.TempPathFactory, write: Callable[[Rows, Path], None], seed: int
) -> None:
    folder = tmp_path_factory.mktemp("trip")
    rows = random_rows(seed)
    write(rows, folder / "source")
    report = run(folder / "source", folder / "out", tokenizer="bytes", template="none")
    dataset = SampleDataset(report.path)
    found = inspect_dataset(dataset, rows=len(rows))
    shown = ["".join(piece.text for piece in sample.pieces) for sample in found.samples]
    assert shown == [row["prompt"] + row["response"] + "<eos>" for row in rows]
    assert [{key: row[key] for key in rows[0]} for row in dataset] == rows


@pytest.mark.parametrize("tokenizer", [None, "bytes"])
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_processes_change_no_byte(
    write: Callable[[Rows, Path], None], tokenizer: str | None, tmp_path: Path
) -> None:
    rows = [{key: value * 20 for key, value in row.items()} for row in random_rows(1, 2500)]
    rows[7]["prompt"] = " "
    write(rows, tmp_path / "source")
    options = {"tokenizer": tokenizer, "template": "none", "on_bad_row": "skip"}
    reports = [run(tmp_path / "source", tmp_path / str(jobs), jobs=jobs, **options) for jobs in (1, 2)]
    assert reports[0].as_json() == reports[1].as_json()
    assert len(reports[0].rejected) == 1
    for name in ("train.bin", "meta.json", "rejected.jsonl"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_a_refusal_in_a_process_leaves_nothing(tmp_path: Path) -> None:
    rows = random_rows(2, 6000)
    rows[5500]["prompt"] = ""
    jsonl(rows, tmp_path / "source")
    with pytest.raises(DataError, match="source:5501: empty prompt"):
        run(tmp_path / "source", tmp_path / "out" / "data", jobs=2)
    assert not list((tmp_path / "out").iterdir())


def test_a_process_that_dies_is_named(tmp_path: Path) -> None:
    import os

    from posttune.data.parallel import ordered_map

    with pytest.raises(RunError, match="process that converted data died"):
        list(ordered_map(lambda code: os._exit(code), [3, 4], jobs=2))
