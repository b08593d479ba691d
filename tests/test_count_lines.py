"""The least plugins keep their contracts and run; the table of their lines is current and honest."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from posttune.hooks import faults
from posttune.pipeline import Member, bind
from posttune.types import Location, Outcome, Request, RolloutContext, Sample, Sampling, SourceRow

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import count_lines  # noqa: E402


def least(kind: str, name: str) -> Member:
    """The class of an example, composed."""
    spec = importlib.util.spec_from_file_location(f"least_{kind}", count_lines.EXAMPLES / f"{kind}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plugin = getattr(module, name)
    assert faults(kind, plugin) == []
    return bind(kind, plugin(), "least")


def samples(*responses: str) -> list[Sample]:
    return [Sample(str(i), 0, "p", response) for i, response in enumerate(responses)]


def test_the_table_is_current(tmp_path: Path) -> None:
    page = ROOT / "docs/count.md"
    copy = tmp_path / "count.md"
    copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    assert count_lines.main([str(copy)]) == 0
    assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8"), (
        "tools/count_lines.py docs/count.md"
    )


def test_none_is_above_the_cheapest_without_a_reason() -> None:
    for row in count_lines.ROWS:
        lines = count_lines.lines_of(count_lines.EXAMPLES / row.example)
        assert row.cheapest is None or lines <= row.cheapest or row.why, row.kind


def test_docstrings_comments_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text(
        '"""Doc\n\nlines."""\n\n# why\nx = 1\n\ndef f():\n    """Doc."""\n    return x\n', encoding="utf-8"
    )
    assert count_lines.lines_of(path) == 3


def test_the_metadata_has_twelve_lines() -> None:
    page = (ROOT / "docs/write_a_reward.md").read_text(encoding="utf-8")
    block = page.partition("posttune-word/pyproject.toml -->\n```toml\n")[2].partition("```")[0]
    assert len([line for line in block.splitlines() if line.strip()]) == 12


def test_the_reward_function_and_the_reward_class() -> None:
    from posttune.config.base import PluginRef
    from posttune.facade import build_rewards

    for path in ("reward.py:score", "reward_plugin.py:Polite"):
        ref = PluginRef(name="function", options={"path": str(count_lines.EXAMPLES / path)})
        (scores,) = build_rewards([ref]).score(samples("please", "no")).values()
        assert scores == [1.0, 0.0]


def test_the_reward_class_keeps_the_contract_of_a_plugin() -> None:
    spec = importlib.util.spec_from_file_location("polite", count_lines.EXAMPLES / "reward_plugin.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert faults("reward", module.Polite) == []


def test_the_manager() -> None:
    from posttune.facade.manager import RewardManager

    scores: dict[str, Any] = {"a": [1.0, None], "b": [0.5, 1.0]}
    rewards = RewardManager(least("reward_manager", "Least")).combine(samples("x", "y"), scores)
    assert [reward.value for reward in rewards] == [0.5, None]


def test_estimator_and_loss() -> None:
    from posttune.facade.algorithms import Estimator, PolicyLoss
    from posttune.testing import _batches

    batch = _batches.random_advantage_batch(0)
    assert Estimator(least("advantage_estimator", "Plain")).compute(batch).advantages.any()
    loss = PolicyLoss(least("policy_loss", "Reinforce")).compute(_batches.random_loss_batch(0))
    assert loss.loss.isfinite().all()


def test_the_converter() -> None:
    from posttune.facade.converter import Converter

    rows = [SourceRow(Location("f", i), {"pair": pair}) for i, pair in enumerate((["p", "r"], ["p"]), 1)]
    good, bad = Converter(least("data_converter", "Pair")).convert(rows, {})
    assert (good.prompt, good.response) == ("p", "r")  # type: ignore[union-attr]
    assert bad.location.row == 2


def test_the_exporter(tmp_path: Path) -> None:
    from posttune.checkpoint.sources import open_source
    from posttune.facade.exporter import Exporter
    from posttune.testing.tiny import tiny_model

    exporter = Exporter(least("checkpoint_exporter", "Folder"))
    source = open_source(tiny_model(tmp_path / "model", layers=1))
    (tmp_path / "out").mkdir()
    report = exporter.export(source, tmp_path / "out", "keep")
    assert "model.safetensors" in report.files
    assert exporter.verify(source, tmp_path / "out").passed


def test_the_engine(tmp_path: Path) -> None:
    from posttune.facade.rollout import RolloutEngine
    from posttune.testing.tiny import tiny_model

    folder = tiny_model(tmp_path / "model", layers=1)
    with RolloutEngine(least("rollout_backend", "Generate")) as engine:
        engine.start(RolloutContext(folder, None, "float32", "cpu", 0, 64))
        requests = [Request("a", (65, 66), 1), Request("b", (67,), 2)]
        sampling = Sampling(n=2, max_new_tokens=6, eos_ids=frozenset(range(100)), logprobs=False)
        answers = engine.generate(requests, sampling)
    assert [answer.request_id for answer in answers] == ["a", "a", "b", "b"]
    assert {answer.finish_reason for answer in answers} <= {"stop", "length"}


def test_the_observer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttune.facade.observers import Observers

    monkeypatch.chdir(tmp_path)
    observers = Observers([least("observer", "Tail")])
    observers.step("rl", 1, {"reward/mean": 0.5})
    observers.run_end(Outcome("rl", "finished", 1))
    assert (tmp_path / "rewards.txt").read_text(encoding="utf-8") == "1 0.5\n"
