"""The reward `function`: what it can call, and how it says that it cannot."""

from __future__ import annotations

import pickle
import sys

import pytest
from posttune.config.models import PluginRef
from posttune.errors import DataError, PluginCallError, PluginOptionsError, PluginReturnError, UserError
from posttune.facade import Rewards, build_rewards
from posttune.reward.loading import also_look_in, load_object
from posttune.types import Sample

SAMPLES = [
    Sample("a:1", 0, "2+2=", "4", "4", {"topic": "sums", "level": 1}),
    Sample("a:2", 0, "2+3=", "6", "5", {"topic": "sums", "level": 2}),
]


@pytest.fixture
def write(tmp_path):
    def write(code: str, name: str = "my_reward.py") -> str:
        path = tmp_path / name
        path.write_text(code, "utf-8")
        return str(path)

    return write


def rewards(path: str, label: str | None = None, **options: object) -> Rewards:
    return build_rewards([PluginRef(name="function", label=label, options={"path": path, **options})])


def scores(path: str, **options: object) -> list[object]:
    return rewards(path, **options).score(SAMPLES)["function"]


@pytest.mark.parametrize(("code", "expected"), [
    ("def f(prompt, response): return len(response)", [1, 1]),
    ("def f(prompt, response, reference): return float(response == reference)", [1, 0]),
    ("def f(response, reference=None): return float(response == reference)", [1, 0]),
    ("def f(samples): return [float(s.response == s.reference) for s in samples]", [1, 0]),
    ("def f(prompt, response, level): return level", [1, 2]),
    ("def f(response, *, topic, weight=2): return weight * len(topic)", [8, 8]),
    ("def f(prompt, response, **columns): return len(columns)", [2, 2]),
    ("def f(**everything): return len(everything)", [2, 2]),
    ("async def f(prompt, response): return 7", [7, 7]),
    ("async def f(samples): return [7 for _ in samples]", [7, 7]),
    ("import asyncio\nasync def f(response):\n    await asyncio.sleep(0)\n    return len(response)", [1, 1]),
    ("class f:\n    def compute_reward(self, prompt, response): return 3", [3, 3]),
    ("class C:\n    def __call__(self, response): return 3\nf = C()", [3, 3]),
    ("from functools import partial\ndef g(response, add): return add\nf = partial(g, add=1)", [1, 1]),
    ("f = lambda response: {'a': 1.0, 'b': 2}", [{"a": 1.0, "b": 2.0}] * 2),
    ("def f(response): return None if response == '6' else 1", [1, None]),
    ("import numpy as np\ndef f(samples): return np.array([0.5, float('nan')])", [0.5, None]),
    ("from posttune import BaseRewardFunction\n"
     "class f(BaseRewardFunction):\n    def compute_reward(self, response, level): return level", [1, 2]),
])  # fmt: skip
def test_signatures(write, code, expected):
    assert scores(f"{write(code)}:f") == expected


def test_a_method_and_a_dotted_name(write):
    code = "class Box:\n    @staticmethod\n    def f(response): return 1\n"
    assert scores(f"{write(code)}:Box.f") == [1, 1]
    assert load_object("posttune.reward.scoring:scalar")(2) == 2.0


def test_needs_come_from_the_signature(write):
    path = write("def f(prompt, response, reference, topic, level=0): return 1")
    needs = rewards(f"{path}:f").needs["function"]
    assert (needs.reference, needs.columns) == (True, ("topic",))
    needs = rewards(f"{write('def g(response, reference=None, **more): return 1', 'other.py')}:g").needs[
        "function"
    ]
    assert (needs.reference, needs.columns) == (False, ())


def test_a_file_runs_once_and_its_objects_can_be_pickled(write):
    path = write("RUNS = []\nRUNS.append(1)\ndef f(response): return len(RUNS)\nclass Verdict: pass")
    assert scores(f"{path}:f") == scores(f"{path}:f") == [1, 1]
    function = load_object(f"{path}:f")
    assert pickle.loads(pickle.dumps(function)) is function
    assert load_object(f"{path}:Verdict").__module__ in sys.modules


def test_two_files_of_one_name_are_two_modules(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "r.py").write_text(f"def f(response): return {len(folder)} + {folder == 'two'}")
    assert scores(f"{tmp_path}/one/r.py:f") == [3, 3]
    assert scores(f"{tmp_path}/two/r.py:f") == [4, 4]


def test_a_module_beside_the_file_can_be_imported(write):
    write("VALUE = 5", "reward_helper_h5.py")
    path = write("from reward_helper_h5 import VALUE\ndef f(response): return VALUE")
    assert scores(f"{path}:f") == [5, 5]


def test_relative_paths_lie_in_the_working_folder_else_beside_the_configuration(write, tmp_path, monkeypatch):
    write("def f(response): return 1", "here_h5.py")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    assert scores("here_h5.py:f") == [1, 1]
    monkeypatch.chdir(elsewhere)
    with pytest.raises(UserError, match="the file does not exist; looked at"):
        rewards("here_h5.py:f")
    also_look_in(tmp_path)
    assert scores("here_h5.py:f") == [1, 1]


@pytest.mark.parametrize(("target", "message"), [
    ("{dir}/missing.py:f", r"the file does not exist; looked at .*/missing\.py"),
    ("{dir}:f", "the file is a folder"),
    ("{dir}/:f", "the file is a folder"),
    ("{file}:scroe", r"it has no 'scroe' \(did you mean 'score'\?\)"),
    ("{file}:CONSTANT", "it is a int, not a function"),
    ("{file}:Plain", "it is a type, not a function"),
    ("{file}:nothing_to_judge", r"\(topic\) takes no response"),
    ("{file}:positional", "'prompt' takes no name"),
    ("{file}:both", "beside samples it requires extra"),
    ("{file}:score.inner", "it has no 'inner'"),
    ("no_such_package_h5.sub:f", "there is no module 'no_such_package_h5'"),
    ("posttune.reward.no_such:f", "there is no module 'posttune.reward.no_such'"),
    ("{broken}:f", r"importing it failed at line 2: ZeroDivisionError"),
    ("{syntax}:f", r"importing it failed at line 1: SyntaxError"),
    ("{leaving}:f", r"importing it failed at line 1: SystemExit"),
    ("{lacking}:f", r"importing it failed at line 1: ModuleNotFoundError: .*'no_such_dependency'"),
])  # fmt: skip
def test_what_cannot_be_loaded_is_refused_before_anything_runs(write, tmp_path, target, message):
    places = {
        "dir": str(tmp_path),
        "file": write(
            "CONSTANT = 3\nclass Plain: pass\n"
            "def score(response): return 1\ndef nothing_to_judge(topic): return 1\n"
            "def positional(prompt, response, /): return 1\ndef both(samples, extra): return 1\n"
        ),
        "broken": write("def f(response): return 1\nVALUE = 1 / 0", "broken.py"),
        "syntax": write("def f(response) return 1", "syntax.py"),
        "leaving": write("raise SystemExit(3)", "leaving.py"),
        "lacking": write("import no_such_dependency", "lacking.py"),
    }
    with pytest.raises(UserError, match=message) as caught:
        rewards(target.format(**places))
    assert "next: " in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("path", ["my_reward.py", "my_reward.py:", ":f"])
def test_a_path_without_a_name_is_a_mistake_in_the_options(path):
    with pytest.raises(PluginOptionsError, match=r"write file\.py:name or package\.module:name"):
        rewards(path)


def test_a_lost_column_or_reference_is_named(write):
    path = write("def f(response, toppic): return 1\ndef g(response, reference): return 1")
    with pytest.raises(DataError, match=r"sample a:1 has no column 'toppic'; its columns: level, topic"):
        scores(f"{path}:f")
    bare = Sample("b:9", 0, "", "x")
    with pytest.raises(DataError, match="sample b:9 has no reference"):
        rewards(f"{path}:g").score([bare])


@pytest.mark.parametrize(("body", "error", "message"), [
    ("raise ValueError('no luck')", PluginCallError, r"\[mine\].*raised ValueError: no luck.*'mine'"),
    ("return 'good'", PluginReturnError, r"\[mine\].*returned str 'good' for sample a:1"),
    ("return True", PluginReturnError, r"returned bool True for sample a:1"),
    ("return float('inf')", PluginReturnError, r"returned float inf for sample a:1"),
    ("return {}", PluginReturnError, r"an empty dict for sample a:1"),
    ("return {'a': 'x'}", PluginReturnError, r"returned str 'x' for dimension 'a' of sample a:1"),
    ("return [1, 2]", PluginReturnError, r"returned list \[1, 2\] for sample a:1"),
    ("import sys; sys.exit(0)", PluginCallError, r"raised SystemExit"),
])  # fmt: skip
def test_bad_answers_are_named(write, body, error, message):
    path = write(f"def f(response):\n    {body}\nasync def later(response):\n    {body}")
    for name in ("f",) if "exit" in body else ("f", "later"):
        with pytest.raises(error, match=message):
            rewards(f"{path}:{name}", label="mine").score(SAMPLES)


def test_an_error_carries_the_sample_that_caused_it(write):
    path = write("def f(response): return 1 / (int(response) - 6)")
    with pytest.raises(PluginCallError) as caught:
        scores(f"{path}:f")
    assert caught.value.__cause__.__notes__ == [f"at {path}:1 in f, while scoring sample a:2"]


@pytest.mark.parametrize(
    "answer", ["[1.0]", "[]", "[1, 2, 3]", "1.0", "'ab'", "None", "(s for s in samples)"]
)
def test_too_few_too_many_or_no_list(write, answer):
    path = write(f"def f(samples): return {answer}")
    with pytest.raises(PluginReturnError, match=r"scores for 2 samples|not a list of scores"):
        scores(f"{path}:f")


def test_weights_make_a_total_and_leave_the_dimensions(write):
    code = "def f(response): return {'right': 1.0, 'brief': 0.5}"
    got = scores(f"{write(code)}:f", weights={"right": 2.0, "brief": 1.0})
    assert got == [{"right": 1.0, "brief": 0.5, "total": 2.5}] * 2
    later = write("async " + code, "later.py")
    assert scores(f"{later}:f", weights={"right": 1, "brief": 0})[0]["total"] == 1.0
    batch = write("def f(samples): return [None, {'a': 2.0}]", "batch.py")
    assert scores(f"{batch}:f", weights={"a": 0.5}) == [None, {"a": 2.0, "total": 1.0}]


@pytest.mark.parametrize(("code", "weights", "message"), [
    ("{'right': 1.0}", {"rihgt": 1.0}, r"'right' has no weight \(did you mean 'rihgt'\?\)"),
    ("{'a': 1.0}", {"a": 1.0, "b": 1.0}, r"'b' has no dimension"),
    ("1.0", {"a": 1.0}, r"needs a dict of dimensions, and it returned a float"),
])  # fmt: skip
def test_weights_and_dimensions_must_agree(write, code, weights, message):
    with pytest.raises(UserError, match=message):
        scores(f"{write(f'def f(response): return {code}')}:f", weights=weights)
