"""The layouts that people have, each with the row count of its manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from data_files import SHARED, SMALL, manifest, rows_of, run
from posttune.data.dataset import SampleDataset

MAPS = {
    "gsm8k_verl_layout_300.parquet": {"reference": "reward_model.ground_truth"},
}
EMPTY_ANSWERS = {
    "ultrafeedback_pref_1000.jsonl": 2,
    "hh_rlhf_harmless_500.jsonl": 1,
    "hh_rlhf_harmless_test.jsonl.gz": 4,
}
CONVERTERS = {
    "dpo_sharegpt_en_demo.json": "preference",
    "hh_rlhf_harmless_500.jsonl": "preference",
    "kto_messages_en_demo.json": "messages",
    "sharegpt_toolcall_en_demo.json": "sharegpt",
    "sharegpt_fastchat_dummy.json": "sharegpt",
    "alpaca_en_demo.json": "alpaca",
    "alpaca_seed_tasks_175.jsonl": "alpaca",
    "ultrafeedback_messages.parquet": "preference",
}
CASES = [
    pytest.param(folder / "formats", entry, id=f"{name}-{Path(entry['file']).name}")
    for name, folder in (("small", SMALL), ("shared", SHARED))
    for entry in manifest(folder / "formats")
]


@pytest.mark.parametrize(("folder", "entry"), CASES)
def test_row_counts(folder: Path, entry: dict[str, Any], tmp_path: Path) -> None:
    name = Path(entry["file"]).name
    converter = "gsm8k" if name.startswith("gsm8k_test") else None
    options: dict[str, Any] = {"converter": converter, "map": MAPS.get(name, {}), "on_bad_row": "skip"}
    report = run(folder / name, tmp_path / "out", **options)
    assert report.rows_in == entry["rows"]
    assert report.rows_out == entry["rows"] - len(report.rejected)
    empty = EMPTY_ANSWERS.get(name, 0) if folder.is_relative_to(SHARED) else len(report.rejected)
    assert len(report.rejected) == empty
    assert all(item["reason"].split()[0] in ("empty", "blank") for item in report.rejected)
    dataset = SampleDataset(report.path)
    used = dataset.meta["converter"]["name"]
    assert used == (converter or CONVERTERS.get(name, used))
    assert len(dataset) == report.rows_out


def read(name: str, tmp_path: Path, **options: Any) -> list[dict[str, Any]]:
    return rows_of(SMALL / "formats" / name, tmp_path / "out", on_bad_row="skip", **options)


def test_gsm8k(tmp_path: Path) -> None:
    first = read("gsm8k_test.parquet", tmp_path, converter="gsm8k")[0]
    assert first["reference"] == "18"
    assert first["response"].endswith("\n#### 18")
    assert "<<" not in first["response"]


def test_verl_layout(tmp_path: Path) -> None:
    name = "gsm8k_verl_layout_300.parquet"
    first = read(name, tmp_path, map=MAPS[name])[0]
    assert first["messages"] == [{"role": "user", "content": first["prompt"]}]
    assert first["reference"] == "18"
    assert first["reward_model"] == {"style": "rule"}
    assert first["extra_info"] == {"split": "test", "index": 0}


def test_hh_rlhf_transcripts_are_split_at_the_last_shared_turn(tmp_path: Path) -> None:
    first = read("hh_rlhf_harmless_500.jsonl", tmp_path)[0]
    assert first["prompt"].startswith("\n\nHuman: Can you help me")
    assert first["prompt"].endswith("How does the app work?\n\nAssistant:")
    assert first["chosen"].startswith(" It\u2019s really simple")


def test_sharegpt_preference(tmp_path: Path) -> None:
    first = read("dpo_sharegpt_en_demo.json", tmp_path)[0]
    assert first["messages"] == [{"role": "user", "content": first["prompt"]}]
    assert first["chosen"].startswith("That sounds like")


def test_preference_as_whole_conversations(tmp_path: Path) -> None:
    first = read("ultrafeedback_messages.parquet", tmp_path)[0]
    assert first["messages"][-1]["role"] == "user"
    assert first["chosen"].startswith("Here's a Java program")
    assert first["score_chosen"] == 9.0


def test_reasoning_and_tool_parts(tmp_path: Path) -> None:
    rows = read("messages_parts_tools_50.jsonl", tmp_path)
    messages = rows[1]["messages"]
    assert messages[2]["reasoning_content"].startswith("Alright, the user wants")
    assert messages[2]["tool_calls"][0]["function"]["name"] == "get_movie_details"
    assert messages[3]["role"] == "tool"
    assert rows[1]["tools"].startswith("[{")


def test_sharegpt_function_calls(tmp_path: Path) -> None:
    messages = read("sharegpt_toolcall_en_demo.json", tmp_path)[0]["messages"]
    assert messages[3]["tool_calls"][0]["function"]["name"] == "search_recipes"
    assert messages[4]["role"] == "tool"
