from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from data_files import rows_of, run, write_jsonl
from data_tokenizers import chatml
from hypothesis import given, settings
from hypothesis import strategies as st
from posttune.config.models import PluginRef
from posttune.data.records import MISSING, RowError, as_text, lookup, other_columns, reference_of
from posttune.data.roles import canonical, infer_converter, resolve
from posttune.data.templates import Template
from posttune.data.tokenize import encode_record, token_view
from posttune.data.writer import prepare
from posttune.errors import DataError
from posttune.facade import build_converter
from posttune.types import BadRow, Location, Record, Roles, SourceRow


def source(data: Mapping[str, Any]) -> SourceRow:
    return SourceRow(Location("f", 1), data)


def convert_one(
    name: str, data: dict[str, Any], columns: dict[str, str], options: dict[str, Any] | None = None
) -> Record | str:
    converter = build_converter(PluginRef(name=name, options=options or {}))
    (found,) = converter.convert([source(data)], columns)
    return found.reason if isinstance(found, BadRow) else found


def record(
    name: str, data: dict[str, Any], columns: dict[str, str], options: dict[str, Any] | None = None
) -> Record:
    found = convert_one(name, data, columns, options)
    assert isinstance(found, Record), found
    return found


class TestRecords:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            ("a", "a"),
            (2, "2"),
            (1.5, "1.5"),
            (Decimal("2.00"), "2.00"),
            (Decimal("1E+2"), "100"),
            (b"\xc3\xbc", "ü"),
        ],
    )
    def test_texts(self, value: object, text: str) -> None:
        assert as_text(value, "response") == text

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            (None, "response is null"),
            (True, "is a bool"),
            ([1], "is a list.*map it to reference"),
            ({"a": 1}, "is an object"),
            (b"\xff", "invalid UTF-8 in response at byte 1"),
            ("a\ud800", "lone surrogate in response at character 2"),
        ],
    )
    def test_no_texts(self, value: object, reason: str) -> None:
        with pytest.raises(RowError, match=reason):
            as_text(value, "response")

    def test_lookup(self) -> None:
        data = {"a": {"b": [{"c": 1}]}, "a.b": 2, "n": None}
        assert lookup(data, "a.b.0.c") == 1
        assert lookup(data, "a.b") == 2  # a column of that very name comes first
        assert lookup(data, "n") is None
        for path in ("x", "a.x", "a.b.1.c", "n.x", "a.b.x"):
            assert lookup(data, path) is MISSING

    def test_reference(self) -> None:
        assert reference_of(source({"r": ["a", 2]}), "r") == ["a", "2"]
        assert reference_of(source({"r": 3}), "r") == "3"
        assert reference_of(source({"r": []}), "r") is None
        assert reference_of(source({}), "r") is None
        with pytest.raises(RowError, match="reference is an object"):
            reference_of(source({"r": {}}), "r")

    def test_other_columns(self) -> None:
        row = source({"q": "a", "m": {"gold": 1, "style": "x"}, "rest": 2})
        assert other_columns(row, {"prompt": "q", "reference": "m.gold"}) == {"m": {"style": "x"}, "rest": 2}
        assert row.data["m"] == {"gold": 1, "style": "x"}


class TestRoles:
    def test_aliases_and_unknown_roles(self) -> None:
        assert canonical({"answer": "a", "prompt": "q"}) == {"response": "a", "prompt": "q"}
        with pytest.raises(DataError, match="no role 'promt'; did you mean 'prompt'"):
            canonical({"promt": "q"})
        with pytest.raises(DataError, match="mapped twice"):
            canonical({"answer": "a", "response": "b"})

    @pytest.mark.parametrize(
        ("mapping", "columns", "name"),
        [
            ({}, "prompt chosen rejected", "preference"),
            ({"chosen": "a", "rejected": "b"}, "a b", "preference"),
            ({}, "messages label", "messages"),
            ({}, "conversations", "messages"),
            ({}, "question answer", "prompt_response"),
            ({"prompt": "q", "response": "chosen"}, "q chosen rejected", "prompt_response"),
            ({}, "prompt", "prompt_response"),
            ({}, "text", "text"),
        ],
    )
    def test_inference(self, mapping: dict[str, str], columns: str, name: str) -> None:
        assert infer_converter(mapping, [source(dict.fromkeys(columns.split(), "x"))]) == name

    def test_nothing_to_infer_from(self) -> None:
        with pytest.raises(DataError, match="columns are input, output"):
            infer_converter({}, [source({"output": "a", "input": "b"})])

    def test_errors_name_columns(self) -> None:
        rows = [source({"question": "a", "anser": "b"})]
        roles = Roles(("prompt", "response"))
        with pytest.raises(DataError, match="no column 'qestion' for prompt; did you mean 'question'"):
            resolve("x", roles, {"prompt": "qestion"}, rows, {})
        with pytest.raises(DataError, match="no column for response, which converter 'x' needs"):
            resolve("x", roles, {}, rows, {})
        with pytest.raises(DataError, match="does not read the role 'chosen'"):
            resolve("x", roles, {"chosen": "question"}, rows, {})
        with pytest.raises(DataError, match="prompt is all null"):
            resolve("x", roles, {}, rows, {"question": "null"})


class TestPromptResponse:
    COLUMNS = {"prompt": "q", "response": "a", "reference": "r"}  # noqa: RUF012

    def test_record(self) -> None:
        found = record("prompt_response", {"q": "2+2", "a": 4, "r": ["4", "four"], "level": 1}, self.COLUMNS)
        assert (found.prompt, found.response, found.reference) == ("2+2", "4", ["4", "four"])
        assert found.columns == {"level": 1}

    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            ({"q": "", "a": "x"}, "empty prompt"),
            ({"q": "x", "a": " \n"}, "blank response"),
            ({"q": "x"}, "response is missing (no column 'a')"),
            ({"q": None, "a": "x"}, "prompt is null"),
        ],
    )
    def test_bad_rows(self, data: dict[str, Any], reason: str) -> None:
        assert convert_one("prompt_response", data, self.COLUMNS) == reason

    def test_a_prompt_of_messages(self) -> None:
        data = {"q": [{"role": "user", "content": "hi"}], "a": "hello"}
        found = record("prompt_response", data, {"prompt": "q", "response": "a"})
        assert found.prompt == "hi"
        assert found.messages is not None
        assert found.messages[-1] == {"role": "assistant", "content": "hello"}


class TestMessages:
    def test_both_styles(self) -> None:
        openai = [{"role": "User", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]
        found = record("messages", {"m": openai}, {"messages": "m"})
        assert found.messages == (
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "weight": 0},
        )
        assert (found.prompt, found.response) == ("a", "b")
        sharegpt = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
        assert record("messages", {"m": sharegpt}, {"messages": "m"}).messages == (
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
        )

    def test_messages_as_json_text(self) -> None:
        found = record("messages", {"m": '[{"role": "assistant", "content": "b"}]'}, {"messages": "m"})
        assert found.response == "b"

    @pytest.mark.parametrize(
        ("messages", "reason"),
        [
            (None, "messages is null"),
            ([], "empty messages"),
            ("hello", "messages is text, not a list of messages"),
            (5, "messages is no list of messages"),
            (["a"], "message 1 is no object"),
            ([{"role": "bot", "content": "a"}], "unknown role bot in message 1"),
            ([{"content": "a"}], "unknown role None in message 1"),
            ([{"role": "user", "content": None}], "content of message 1 (user) is null"),
            ([{"role": "user", "content": {"a": 1}}], "content of message 1 is an object, not text"),
            (
                [{"role": "user", "content": [{"type": "audio"}]}],
                "audio part in a text-only converter (message 1)",
            ),
            ([{"role": "user", "content": "a"}], "no final assistant turn (the last one is the user's)"),
            ([{"role": "assistant", "content": " "}], "blank final assistant turn"),
            (
                [{"from": "function_call", "value": "f()"}],
                "tool call of message 1 is text, not a list of messages",
            ),
        ],
    )
    def test_bad_rows(self, messages: object, reason: str) -> None:
        assert convert_one("messages", {"m": messages}, {"messages": "m"}) == reason

    def test_a_missing_column(self) -> None:
        assert convert_one("messages", {}, {"messages": "m"}) == "messages is missing (no column 'm')"

    def test_prompt_only(self) -> None:
        data = {"m": [{"role": "user", "content": "a"}]}
        found = record("messages", data, {"messages": "m"}, {"allow_prompt_only": True})
        assert found.response is None


class TestGSM8K:
    COLUMNS = {"prompt": "question", "response": "answer"}  # noqa: RUF012

    def test_annotations_and_reference(self) -> None:
        data = {"question": "q", "answer": "48/2 = <<48/2=24>>24.\n#### 1,024"}
        found = record("gsm8k", data, self.COLUMNS)
        assert found.response == "48/2 = 24.\n#### 1,024"
        assert found.reference == "1024"
        kept = record("gsm8k", data, self.COLUMNS, {"annotations": True})
        assert kept.response == data["answer"]

    @pytest.mark.parametrize("answer", ["24", "24\n####", "24\n####  "])
    def test_no_final_answer(self, answer: str) -> None:
        reason = "the answer has no '####' line with a final answer"
        assert convert_one("gsm8k", {"question": "q", "answer": answer}, self.COLUMNS) == reason


class TestPreference:
    COLUMNS = {"chosen": "c", "rejected": "r"}  # noqa: RUF012

    def test_transcripts(self) -> None:
        start = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
        found = record("preference", {"c": start + " yes", "r": start + " yet no"}, self.COLUMNS)
        assert (found.prompt, found.chosen, found.rejected) == (start, " yes", " yet no")

    @pytest.mark.parametrize(
        ("chosen", "rejected", "reason"),
        [
            ("yes", "no", "no prompt: neither a column"),
            ("\n\nAssistant: a", "\n\nAssistant: ", "blank rejected"),
            ([{"role": "user", "content": "a"}], "x", "chosen does not end with an assistant turn"),
            (
                [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
                [{"role": "user", "content": "c"}, {"role": "assistant", "content": "b"}],
                "answer different conversations",
            ),
        ],
    )
    def test_bad_rows(self, chosen: object, rejected: object, reason: str) -> None:
        found = convert_one("preference", {"c": chosen, "r": rejected}, self.COLUMNS)
        assert isinstance(found, str)
        assert reason in found


CHATML = chatml()
ROLES = st.sampled_from(["user", "assistant", "gpt", "function_call", "tool", "system"])
KEYS = st.sampled_from(
    ["type", "text", "value", "function", "name", "arguments", "role", "content", "from", "x"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
ODD = {"tool_calls": JSON, "weight": JSON, "loss_weight": JSON}
MESSAGE = st.fixed_dictionaries(
    {}, optional={"role": ROLES | JSON, "from": ROLES | JSON, "content": JSON, "value": JSON, **ODD}
)


class TestAnything:
    """Whatever a row holds, it becomes a record or a bad row, and tokens or a reason."""

    @settings(deadline=None, max_examples=100)
    @given(
        name=st.sampled_from(["prompt_response", "messages", "preference", "gsm8k"]),
        value=st.lists(MESSAGE, max_size=3) | MESSAGE | JSON,
        other=st.text(max_size=5) | JSON,
        extra=JSON,
    )
    def test_no_value_crashes(self, name: str, value: Any, other: Any, extra: Any) -> None:
        columns = {"prompt": "a", "response": "b", "chosen": "a", "rejected": "b", "messages": "a"}
        found = convert_one(name, {"a": value, "b": other, "tools": extra}, columns)
        if isinstance(found, str):
            return
        prepare(found, Counter())
        with contextlib.suppress(RowError):
            encode_record(token_view(found), CHATML, Template("auto", str(CHATML.chat_template)))


class TestReachingRewards:
    def test_columns_that_would_hide_a_role_are_renamed(self, tmp_path: Path) -> None:
        rows = [{"q": "a", "prompt": "other", "input_ids": [1], "response": "b"}]
        path = write_jsonl(tmp_path / "x.jsonl", rows)
        report = run(path, tmp_path / "out", map={"prompt": "q"})
        assert report.warnings == [{"code": "column_renamed", "count": 2}]
        (row,) = rows_of(path, tmp_path / "out", map={"prompt": "q"})
        assert row["prompt"] == "a"
        assert row["source.prompt"] == "other"
        assert row["source.input_ids"] == [1]

    def test_the_response_is_the_reference_where_none_is_mapped(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "x.jsonl", [{"prompt": "a", "response": "b", "gold": ["c", "d"]}])
        assert rows_of(path, tmp_path / "1")[0]["reference"] == "b"
        assert rows_of(path, tmp_path / "2", map={"reference": "gold"})[0]["reference"] == ["c", "d"]
