"""``inspect --overfit`` and ``inspect --reward``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from data_files import SMALL, run, write_jsonl
from data_tokenizers import chatml
from posttune.cli.main import main
from posttune.data.dataset import SampleDataset
from posttune.errors import DataError
from posttune.models.tokenizer import save_tokenizer
from posttune.testing.tiny import tiny_model
from posttune.trainer.overfit import judge, overfit

ROWS = [{"question": f"What is {n} + {n}?", "answer": f"It is {2 * n}."} for n in range(12)]


def inspected(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    assert main(["data", "inspect", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_overfit_with_a_new_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", ROWS)
    found = inspected(capsys, source, "--overfit", 10)["overfit"]
    assert found["falls"] is True
    assert len(found["losses"]) == 11
    assert found["losses"][-1] < found["losses"][0] * 0.8
    assert found["rows"] == 8
    assert found["tokens"] == sum(len(row["answer"]) + 1 for row in ROWS[:8])  # with its EOS


def test_overfit_with_a_model_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tokenizer(chatml(), tmp_path / "tokenizer")
    model = tiny_model(tmp_path / "model", tokenizer=tmp_path / "tokenizer")
    source = write_jsonl(tmp_path / "x.jsonl", ROWS)
    words = ("data", "inspect", source, "--overfit", 2, "--model", model)
    assert main([str(word) for word in words]) == 0
    assert "nats a token in 2 steps" in capsys.readouterr().out


def test_overfit_needs_something_to_train(tmp_path: Path) -> None:
    report = run(write_jsonl(tmp_path / "x.jsonl", [{"prompt": "a"}]), tmp_path / "out")
    with pytest.raises(DataError, match="no row has a response"):
        overfit(SampleDataset(report.path), steps=1)


@pytest.mark.parametrize(
    ("losses", "falls", "part"),
    [
        ([5.0, 4.0, 3.0], True, "falls as it should, from 5.000 to 3.000"),
        ([5.0, 5.1, 4.9], False, "does not fall"),
        ([5.0, math.nan, 4.0], False, "not finite"),
        ([0.01, 0.01, 0.01], True, "knows these rows"),
    ],
)
def test_verdicts(losses: list[float], falls: bool, part: str) -> None:
    found, verdict = judge(losses)
    assert found is falls
    assert part in verdict


def test_what_rewards_lack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", [{"prompt": "a"}, {"prompt": "b", "reference": "2"}])
    code = "def score(prompt, response, level):\n    return 1.0\n"
    (tmp_path / "mine.py").write_text(code, "utf-8")
    own = f'function:{{"path": "{tmp_path}/mine.py:score"}}'
    found = inspected(capsys, source, "--reward", "gsm8k", "--reward", own)["lacking"]
    assert {"reward": "gsm8k", "column": "reference", "rows": 1} in found
    assert {"reward": "function", "column": "level", "rows": 2} in found
    fine = inspected(capsys, SMALL / "formats" / "gsm8k_test.parquet", "--reward", "gsm8k")
    assert fine["lacking"] == []
