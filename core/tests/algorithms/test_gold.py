"""The gold cases of verl and TRL, and the command that runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from posttune.cli.main import main
from posttune.errors import DataError
from posttune.selftest.gold import read_cases, run_gold

GOLD = Path(__file__).parents[3] / "tests" / "data" / "gold"


def one(tmp_path: Path, case: dict[str, Any]) -> Path:
    path = tmp_path / "gold.json"
    path.write_text(json.dumps({"cases": [case]}))
    return path


def by_name(name: str, file: str = "algorithms.json") -> dict[str, Any]:
    document = json.loads((GOLD / file).read_text())
    found: dict[str, Any] = next(case for case in document["cases"] if case["name"] == name)
    return found


@pytest.mark.parametrize(("file", "cases"), [("algorithms.json", 48), ("more.json", 59)])
def test_every_gold_case_passes(file: str, cases: int) -> None:
    report = run_gold(GOLD / file)
    assert report.failed == []
    assert report.unsupported == []
    assert report.passed == cases == len(read_cases(GOLD / file))


@pytest.mark.parametrize("case", read_cases(GOLD / "algorithms.json"), ids=lambda case: str(case.name))
def test_every_output_is_really_compared(case: Any, tmp_path: Path) -> None:
    """A case whose outputs are all moved by ten tolerances must fail in each of them."""
    moved = {name: _moved(value, 10 * case.tol) for name, value in case.outputs.items()}
    document = {
        "name": case.name,
        "source": case.source,
        "inputs": case.inputs,
        "outputs": moved,
        "tol": case.tol,
    }
    report = run_gold(one(tmp_path, document))
    assert {failure.output for failure in report.failed} == set(case.outputs)
    assert report.passed == 0


def _moved(value: Any, by: float) -> Any:
    if isinstance(value, list):
        return [_moved(item, by) for item in value]
    return value + by * max(1.0, abs(value))


def test_masked_places_are_not_compared_but_gradients_are(tmp_path: Path) -> None:
    case = by_name("grpo/std=True")
    case["outputs"]["advantages"][2][2] = 55.0  # masked
    assert run_gold(one(tmp_path, case)).passed == 1
    case = by_name("ppo_clip/token-mean/c=3")
    case["outputs"]["grad"][0][3] = 55.0  # masked
    assert [failure.output for failure in run_gold(one(tmp_path, case)).failed] == ["grad"]


def test_a_wrong_shape_fails(tmp_path: Path) -> None:
    case = by_name("kl/k1")
    case["outputs"]["value"] = case["outputs"]["value"][:-1]
    assert [failure.output for failure in run_gold(one(tmp_path, case)).failed] == ["value"]


@pytest.mark.parametrize("expected", [float("nan"), None, "0.5", float("inf")])
def test_what_is_no_number_never_passes(tmp_path: Path, expected: Any) -> None:
    case = by_name("agg/token-mean")
    case["outputs"]["value"] = expected
    assert run_gold(one(tmp_path, case)).passed == 0


def test_the_library_decides_the_defaults(tmp_path: Path) -> None:
    """NUMERICS part 2: the eps alone moves the fourth digit."""
    case = by_name("grpo/std=True")
    case["source"] = "trl.GRPOTrainer"
    assert run_gold(one(tmp_path, case)).passed == 0
    case["inputs"]["eps"] = 1e-6
    assert run_gold(one(tmp_path, case)).passed == 1


@pytest.mark.parametrize(
    "name", ["nonsense", "kl/full", "agg/median", "policy/clip_cov/token-mean", "trl/x/token"]
)
def test_an_unknown_family_or_variant_is_unsupported(tmp_path: Path, name: str) -> None:
    case = by_name("kl/k1") | {"name": name, "outputs": {"value": 0.0}}
    report = run_gold(one(tmp_path, case))
    assert (report.passed, report.failed, report.unsupported) == (0, [], [name])


def test_an_unknown_output_is_unsupported(tmp_path: Path) -> None:
    case = by_name("kl/k1")
    case["outputs"]["hessian"] = [0.0]
    assert run_gold(one(tmp_path, case)).unsupported == ["kl/k1"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("[]", 'no list of "cases"'),
        ('{"cases": []}', 'no list of "cases"'),
        ('{"cases": [3]}', "case 1 lacks 'name'"),
        ('{"cases": [{"name": "kl/k1", "source": "verl", "inputs": {}}]}', "case 1 lacks 'outputs'"),
        ('{"cases": [{"name": "kl/k1", "source": "verl", "inputs": {}, "outputs": {}, "tol": -1}]}', "tol"),
        ('{"cases": [{"name": "kl/k1", "source": "verl", "inputs": {}, "outputs": {"value": 1}}]}', "'logp'"),
        (
            '{"cases": [{"name": "kl/k1", "source": "v", "inputs": {"logp": [[1], [1, 2]]}, "outputs": {}}]}',
            "no rectangle",
        ),
    ],
)
def test_another_format_is_refused_with_what_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(DataError, match=says):
        run_gold(path)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "gold", str(GOLD / "algorithms.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"passed": 48, "failed": [], "unsupported": []}
    case = by_name("agg/token-mean") | {"outputs": {"value": 2.6}}
    assert main(["selftest", "gold", str(one(tmp_path, case)), "--json"]) == 1
    failed = {"name": "agg/token-mean", "output": "value", "expected": 2.6, "got": 2.5}
    assert json.loads(capsys.readouterr().out) == {"passed": 0, "failed": [failed], "unsupported": []}
    assert main(["selftest", "gold", str(one(tmp_path, case))]) == 1
    assert "0 passed, 1 failed" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "not json"])
def test_command_refuses_what_is_no_gold_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    path = tmp_path / "gold.json"
    if content:
        path.write_text(content)
    assert main(["selftest", "gold", str(path), "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["who"] == str(path)
