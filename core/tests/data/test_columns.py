"""The short cut by columns gives what the way row by row gives, or is not taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_files import run, write_jsonl
from data_tokenizers import chatml, llama, spaced
from hypothesis import given, settings
from hypothesis import strategies as st
from posttune.data.columns import parse_lines, strings
from posttune.data.encoded import Encoded
from posttune.data.row_stream import BlockConverter
from posttune.data.templates import Template
from posttune.data.tokenize import Encoder
from posttune.errors import DataError

pytestmark = pytest.mark.slow

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        "",
        " ",
        "\u2003",
        "a & b",
        "&amp;",
        "caf\u00c3\u00a9",
        "\ufffd",
        "\x07",
        "<|x|>",
        "\u0085",
        "x <<1+1=2>> #### 1,000",
    ]
)
PLAIN = st.fixed_dictionaries({"question": TEXTS, "answer": TEXTS.map(lambda text: text + "\n#### 7")})
ODD = st.fixed_dictionaries({"question": TEXTS}, optional={"answer": TEXTS | st.none() | st.integers()})
MARKED = st.lists(
    st.sampled_from([" ", "a", "clips", "<s>", "</s>", "<|im_end|>", "\n", "\u00e9", "48", "  "]), max_size=6
).map("".join)
MORE = st.fixed_dictionaries({"question": TEXTS, "answer": TEXTS, "level": TEXTS, "reference": TEXTS})


def result(path: Path, to: Path, converter: str, tokenizer: Path | None, **options: Any) -> Any:
    try:
        run(path, to, converter=converter, on_bad_row="skip", tokenizer=tokenizer, **options)
    except DataError as error:
        return str(error)
    names = [name for name in ("train.bin", "meta.json", "rejected.jsonl") if (to / name).exists()]
    return [(to / name).read_bytes() for name in names]


def both_ways(
    path: Path, folder: Path, converter: str, tokenizer: Path | None = None, **options: Any
) -> tuple[Any, Any]:
    quick = result(path, folder / "quick", converter, tokenizer, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockConverter, "_by_columns", lambda self, task: None)
        return quick, result(path, folder / "slow", converter, tokenizer, **options)


@pytest.mark.parametrize("converter", ["gsm8k", "prompt_response"])
@settings(deadline=None, max_examples=25)
@given(
    rows=st.lists(PLAIN, min_size=1, max_size=8)
    | st.lists(PLAIN | ODD, min_size=1, max_size=6)
    | st.lists(MORE, min_size=1, max_size=6),
    ascii_only=st.booleans(),
    end=st.sampled_from(["\n", "\r\n", "\n\n"]),
)
def test_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    converter: str,
    rows: list[dict[str, Any]],
    ascii_only: bool,
    end: str,
) -> None:
    folder = tmp_path_factory.mktemp("both")
    text = "".join(json.dumps(row, ensure_ascii=ascii_only) + end for row in rows)
    path = folder / "x.jsonl"
    path.write_bytes(text.encode("utf-8"))
    quick, slow = both_ways(path, folder, converter)
    assert quick == slow


@pytest.fixture(scope="module", params=["chatml", "llama", "spaced"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    {"chatml": chatml, "llama": llama, "spaced": spaced}[request.param]().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("converter", ["gsm8k", "prompt_response", "text"])
@settings(deadline=None, max_examples=12)
@given(
    rows=st.lists(
        st.fixed_dictionaries({"question": MARKED, "answer": MARKED.map("{}\n#### 7".format)}),
        min_size=1,
        max_size=6,
    ),
    limit=st.sampled_from([None, None, 12]),
    template=st.sampled_from(["none", "none", "auto"]),
)
def test_the_same_bytes_of_tokens(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: Path,
    converter: str,
    rows: list[dict[str, str]],
    limit: int | None,
    template: str,
) -> None:
    folder = tmp_path_factory.mktemp("both")
    path = write_jsonl(folder / "x.jsonl", rows)
    mapping = {"text": "answer"} if converter == "text" else {}
    quick, slow = both_ways(
        path,
        folder,
        converter,
        tokenizer,
        template=template,
        max_length=limit,
        truncation="left",
        map=mapping,
    )
    assert quick == slow


def test_tokens_by_columns(tmp_path: Path) -> None:
    encoder = Encoder(llama(), Template("none", None))
    rows = [{"prompt": "a b", "response": "c"}, {"prompt": "x", "response": "y</s>"}]
    columns = {role: strings([row[role] for row in rows]) for role in ("prompt", "response")}
    found = encoder.columns(columns)
    assert found is not None
    for index, expected in enumerate(encoder.encode(rows)):
        assert isinstance(expected, Encoded)
        for name in ("prompt_ids", "input_ids", "loss_mask", "rejected_ids"):
            assert found.arrays[name][index].as_py() == getattr(expected, name)


def test_it_is_taken_for_plain_rows() -> None:
    found = parse_lines("x", 5, b'{"a": "x", "b": "\\u00e4"}\n{"b": "z", "a": "y"}')
    assert found is not None
    assert (found.first, len(found)) == (5, 2)
    assert {name: column.to_pylist() for name, column in found.texts.items()} == {
        "a": ["x", "y"],
        "b": ["\u00e4", "z"],
    }


@pytest.mark.parametrize(
    "data",
    [
        b'{"a": "x"}\n\n{"a": "y"}\n',
        b'{"a": "x"}{"a": "y"}\n\n',
        b'{"a":\n"x"}\n{"a": "y"}{"a": "z"}\n',
        b'{"a": "x", "a": "y"}\n',
        b'{"a": "x"}\n{"a": "x", "a": "y"}\n',
        b'{"a": "x"}\n{}\n',
        b'{"a": "x"}\n{"a": null}\n',
        b'{"a": "x"}\n{"a": 1}\n',
        b'{"a": 1}\n',
        b'{"a": "x"}\n{"b": "y"}\n',
        b'{"a": "x"}\n["a"]\n',
        b'{"a": "x"}\n{"a": "\\ud800"}\n',
        b'{"a": "x"}\n{"a": "\xff"}\n',
        b'{"a": "x"}\n{"a": "\xed\xa0\x80"}\n',
        b'{"a": "x"}\n{"a": "\t"}\n',
        b'{"a": "x"} {"a": NaN}\n',
        b'\xef\xbb\xbf{"a": "x"}\n',
        b"{}\n",
    ],
)
def test_it_is_not_taken_for_others(data: bytes) -> None:
    assert parse_lines("x", 1, data) is None
