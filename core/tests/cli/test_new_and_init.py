"""``posttune init`` and ``posttune new``: what they write, and what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from posttune.cli.main import main
from posttune.config.load import load_config
from posttune.kinds import KINDS
from posttune.template.recipes import ALGORITHMS, RECIPES

MINE = '''
def score(response):
    """The share of capital letters."""
    return sum(letter.isupper() for letter in response) / max(len(response), 1)
'''


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


class TestInit:
    @pytest.mark.parametrize("recipe", list(RECIPES))
    def test_what_it_writes_is_valid_and_said(
        self, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert main(["init", recipe, "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert set(said["files"]) == names(tmp_path)
        assert "run.yaml" in said["files"]
        assert main(["config", "check", "run.yaml"]) == 0
        first = (tmp_path / "run.yaml").read_text(encoding="utf-8").splitlines()[0]
        link = first.removeprefix("# yaml-language-server: $schema=")
        assert json.loads((tmp_path / link).read_text(encoding="utf-8"))["title"] == "RunConfig"

    @pytest.mark.parametrize("recipe", list(ALGORITHMS))
    def test_an_algorithm_has_what_its_recipe_in_configs_has(self, recipe: str, tmp_path: Path) -> None:
        """Names of estimator, loss and manager, the KL term and the critic, as in ``configs/``."""
        assert main(["init", recipe, "--in", str(tmp_path / "made")]) == 0
        ours = load_config(str(tmp_path / "made/run.yaml")).config.stages["rl"]
        theirs = load_config(str(Path(__file__).parents[3] / f"configs/{recipe}.yaml")).config.stages["rl"]
        assert ours.advantage == theirs.advantage
        assert (ours.loss.name, ours.loss.aggregation) == (theirs.loss.name, theirs.loss.aggregation)
        assert ours.loss.options == theirs.loss.options
        assert ours.reward_manager.name == theirs.reward_manager.name
        assert (ours.critic is None) == (theirs.critic is None)
        if theirs.kl.where != "none":
            assert (ours.kl.where, ours.kl.estimator) == (theirs.kl.where, theirs.kl.estimator)

    def test_it_replaces_nothing_but_the_schema(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "reward.py").write_text("mine", encoding="utf-8")
        (tmp_path / "posttune.schema.json").write_text("old", encoding="utf-8")
        assert main(["init", "--in", str(tmp_path)]) == 2
        assert "reward.py is there already; nothing was written" in capsys.readouterr().err
        assert names(tmp_path) == {"reward.py", "posttune.schema.json"}
        assert (tmp_path / "posttune.schema.json").read_text(encoding="utf-8") == "old"
        assert main(["init", "sft", "--in", str(tmp_path)]) == 0
        assert (tmp_path / "posttune.schema.json").read_text(encoding="utf-8") != "old"

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["init", "gpro"], "no recipe is called 'gpro' (did you mean"),
            (["init", ""], "no recipe is called ''"),
            (["init", "../sft"], "no recipe is called '../sft'"),
            (["init", "toy", "--in", "{file}"], "is a file"),
        ],
    )
    def test_what_it_refuses(
        self, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "file"
        file.touch()
        assert main([word.format(file=file) for word in words]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert "\n  next: " in said
        assert names(tmp_path) == {"file"}

    def test_the_list_names_every_recipe(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["init", "--list", "--json"]) == 0
        assert [row["recipe"] for row in json.loads(capsys.readouterr().out)] == list(RECIPES)
        assert main(["init", "--list"]) == 0
        assert "DAPO (arXiv:2503.14476)" in capsys.readouterr().out

    @pytest.mark.slow
    def test_from_nothing_to_a_reward_that_trains(self, tmp_path: Path) -> None:
        """Two commands, and the lines of one function: the model learns what it rewards."""

        def command(*words: str) -> None:
            done = subprocess.run(
                [sys.executable, "-m", "posttune", *words], cwd=tmp_path, capture_output=True, timeout=300
            )
            assert done.returncode == 0, done.stderr.decode()

        command("init", "toy")
        (tmp_path / "reward.py").write_text(MINE, encoding="utf-8")
        command("run", "run.yaml")
        lines = (tmp_path / "runs/toy/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rewards = [json.loads(line)["reward/mine/mean"] for line in lines]
        assert len(MINE.strip().splitlines()) <= 20
        assert rewards[0] < 0.2
        assert rewards[-1] > 0.8


class TestNew:
    def test_a_project_whole_or_not_at_all(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["new", "reward", "good_manners", "--in", str(tmp_path), "--author", "Ada L."]
        assert main([*words, "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        project = tmp_path / "posttune-good-manners"
        assert Path(said["project"]) == project
        assert set(said["files"]) == names(project)
        assert "Copyright (c) Ada L." in (project / "LICENSE").read_text(encoding="utf-8")
        before = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
        assert main(words) == 2
        assert "is there already" in capsys.readouterr().err
        assert before == {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
        assert [path.name for path in tmp_path.iterdir()] == [project.name]

    def test_it_says_what_to_do_next(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["new", "observer", "best", "--in", str(tmp_path)]) == 0
        assert f"next: cd {tmp_path}/posttune-best && pip install -e '.[test]' && pytest" in (
            capsys.readouterr().out
        )

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["rewrad", "fine"], "no kind of plugin is called 'rewrad' (did you mean 'reward'?)"),
            (["", "fine"], "no kind of plugin is called ''"),
            (["reward", "My"], "'My' cannot name a plugin"),
            (["reward", "9lives"], "cannot name a plugin"),
            (["reward", "a-b"], "cannot name a plugin"),
            (["reward", "class"], "cannot name a plugin"),
            (["reward", "../up"], "cannot name a plugin"),
            (["reward", "ümlaut"], "cannot name a plugin"),
            (["reward", "{{ 7 * 7 }}"], "cannot name a plugin"),
            (["reward", "a" * 61], "cannot name a plugin"),
            (["reward", "posttune_mine"], "leave posttune out of the name"),
            (["reward", "fine", "--description", "two\nlines"], "is not one line of text"),
            (["reward", "gsm8k"], "reward 'gsm8k' is the name of a plugin of posttune already"),
            (["reward", "fine", "--description", " "], "the description is empty"),
            (["reward", "fine", "--author", "bell\a"], "is not one line of text"),
            (["reward", "fine", "--in", "{missing}"], "no such folder"),
        ],
    )
    def test_what_it_refuses(
        self, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        missing = str(tmp_path / "missing")
        given = [word.replace("{missing}", missing) for word in words]
        place = [] if "--in" in words else ["--in", str(tmp_path)]
        assert main(["new", *given, *place]) == 2
        assert message in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []

    def test_braces_in_a_text_are_text(self, tmp_path: Path) -> None:
        said = "Scores {{ braces }} and {% raw %}."
        assert main(["new", "reward", "braces", "--in", str(tmp_path), "--description", said]) == 0
        assert said in (tmp_path / "posttune-braces/README.md").read_text(encoding="utf-8")

    def test_without_cookiecutter_it_says_what_to_install(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "cookiecutter.main", None)
        assert main(["new", "reward", "fine", "--in", str(tmp_path)]) == 2
        assert 'pip install "posttune[new]"' in capsys.readouterr().err

    def test_every_kind_is_offered_in_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["new", "nothing", "x"]) == 2
        said = capsys.readouterr().err
        assert all(kind in said for kind in KINDS)
