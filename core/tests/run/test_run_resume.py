"""What is left to do in a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from posttune.config.load import load_config
from posttune.config.models import RunConfig
from posttune.errors import RunError, UserError
from posttune.run.folder import RunFolder, StageMarker, StageStatus
from posttune.run.resume import changes, digest, make_plan, stage_settings

DATA: dict[str, Any] = {
    "output": "x",
    "stages": {
        "convert": {"source": "rows.jsonl"},
        "sft": {"model": "m", "data": "convert", "steps": 3},
        "export": {"model": "sft"},
    },
}


def config(*overrides: str) -> RunConfig:
    return load_config(DATA, overrides).config


def mark(
    folder: RunFolder, name: str, status: StageStatus, output: str | None = None, first: int = 0
) -> None:
    settings = stage_settings(config(), name)
    kind = settings["kind"]
    marker = StageMarker(status, kind, digest(settings), settings, output, {"a": 1}, 2.0, first)
    folder.stages.parent.mkdir(exist_ok=True)
    folder.write_marker(name, marker)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def actions(folder: RunFolder, *overrides: str) -> list[str]:
    return [step.action for step in make_plan(config(*overrides), folder, resume=True)]


def test_a_new_folder_runs_everything(folder: RunFolder) -> None:
    assert [step.action for step in make_plan(config(), folder, resume=False)] == ["run"] * 3
    assert actions(folder) == ["run"] * 3


@pytest.mark.parametrize("trace", ["resolved.yaml", "metrics.jsonl", "stages/", "checkpoints/"])
def test_a_used_folder_is_refused_without_resume(folder: RunFolder, trace: str) -> None:
    folder.path.mkdir()
    place = folder.path / trace
    place.mkdir() if trace.endswith("/") else place.touch()
    with pytest.raises(UserError, match="holds a run already") as caught:
        make_plan(config(), folder, resume=False)
    assert caught.value.exit_code == 2
    assert "--resume" in caught.value.fix


def test_other_files_in_the_folder_do_not_matter(folder: RunFolder) -> None:
    folder.path.mkdir()
    (folder.path / "my_reward.py").touch()
    assert make_plan(config(), folder, resume=False)


def test_a_file_in_the_place_of_the_folder(folder: RunFolder) -> None:
    folder.path.touch()
    with pytest.raises(UserError, match="is a file"):
        make_plan(config(), folder, resume=False)


def test_finished_stages_are_skipped_and_the_unfinished_one_continues(folder: RunFolder) -> None:
    mark(folder, "convert", "finished")
    mark(folder, "sft", "interrupted")
    assert actions(folder) == ["skip", "continue", "run"]


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("sft.optimizer.lr=1e-3", "optimizer.lr: 1e-05 -> 0.001"),
        ("sft.steps=4", "steps: 3 -> 4"),
        ("seed=1", "seed: 0 -> 1"),
        ("sft.model={path: m, lora: {rank: 4}}", 'model: "m" -> absent'),
    ],
)
def test_a_changed_field_of_a_finished_stage_is_named(folder: RunFolder, override: str, change: str) -> None:
    mark(folder, "sft", "finished")
    with pytest.raises(UserError, match="'sft' is finished, and its configuration has changed") as caught:
        actions(folder, override)
    assert change in str(caught.value)


def test_when_checkpoints_are_written_may_change(folder: RunFolder) -> None:
    mark(folder, "convert", "finished")
    mark(folder, "sft", "finished")
    assert actions(folder, "sft.checkpoint.every=7") == ["skip", "skip", "run"]


def test_a_changed_stage_with_a_checkpoint_is_refused(folder: RunFolder) -> None:
    mark(folder, "sft", "interrupted", first=4)
    (folder.checkpoints / "global_step_6").mkdir(parents=True)
    with pytest.raises(UserError, match="has checkpoints"):
        actions(folder, "sft.steps=5")
    assert actions(folder) == ["run", "continue", "run"]


def test_a_stage_that_failed_before_its_first_checkpoint_can_be_changed(folder: RunFolder) -> None:
    mark(folder, "sft", "failed", first=4)
    (folder.checkpoints / "global_step_4").mkdir(parents=True)
    assert actions(folder, "sft.steps=5")[1] == "run"


def test_a_missing_output_is_named(folder: RunFolder) -> None:
    mark(folder, "convert", "finished", output="data/convert")
    with pytest.raises(UserError, match="data/convert is gone"):
        actions(folder)
    (folder.path / "data/convert").mkdir(parents=True)
    assert actions(folder)[0] == "skip"


def test_a_finished_stage_cannot_rest_on_one_that_runs_again(folder: RunFolder) -> None:
    for name in ("convert", "sft", "export"):
        mark(folder, name, "finished")
    assert actions(folder) == ["skip"] * 3
    (folder.stages / "sft.json").unlink()
    with pytest.raises(UserError, match="'export' is finished, but 'sft', on which it rests, is not"):
        actions(folder)


def test_a_default_that_came_later_is_no_change(folder: RunFolder) -> None:
    mark(folder, "convert", "finished")
    settings = stage_settings(config(), "sft")
    del settings["packing"]
    folder.write_marker("sft", StageMarker("finished", "sft", "", settings))
    assert actions(folder)[1] == "skip"


def test_a_damaged_marker_is_an_error(folder: RunFolder) -> None:
    folder.stages.mkdir(parents=True)
    (folder.stages / "sft.json").write_text("{")
    with pytest.raises(RunError, match="damaged stage marker"):
        actions(folder)


def test_changes_reach_into_lists_of_mappings() -> None:
    old = {"a": [{"x": 1}, {"x": 2}], "b": [1, 2], "c": {}}
    assert changes(old, {"a": [{"x": 1}, {"x": 3}], "b": [1, 2], "c": {}}) == ["a.1.x: 2 -> 3"]
    assert changes(old, {"a": [{"x": 1}, {"x": 2}], "b": [2, 1], "c": {}}) == ["b: [1, 2] -> [2, 1]"]
    assert changes({}, {"a": 1}) == ["a: absent -> 1"]
    assert changes(old, old) == []


def test_the_digest_follows_content_alone() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})


def test_only_one_run_at_a_time_is_in_a_folder(folder: RunFolder) -> None:
    with folder.locked(), pytest.raises(UserError, match="another process"), folder.locked():
        pytest.fail("the block must not run")
    with folder.locked():
        pass


def test_markers_of_a_moved_run_still_lead_to_its_outputs(folder: RunFolder, tmp_path: Path) -> None:
    inside, outside = folder.stored(folder.model("sft")), folder.stored(tmp_path / "elsewhere")
    assert inside == "models/sft"
    moved = RunFolder(tmp_path / "moved")
    assert moved.restored(inside) == moved.path / "models/sft"
    assert moved.restored(outside) == tmp_path / "elsewhere"
