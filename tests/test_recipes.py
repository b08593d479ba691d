"""The recipes in configs/: each is valid, and runs from end to end in miniature."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from posttune.config.load import check_config, load_config

ROOT = Path(__file__).parents[1]
RECIPES = sorted(ROOT.glob("configs/*.yaml"))
OPTIMIZERS = (str(Path(sys.prefix) / "optimizers"),)  # torchao: see requirements-optimizers.txt
ENGINES = {"ppo_7b_one_gpu.yaml", "ppo_7b_one_h200.yaml"}  # their engine need not be installed here
SIZES = {"train": 4000, "dev": 200, "prompts": 9300, "test": 500}


def run(*command: str | Path, path: tuple[str, ...] = ()) -> str:
    """Run a command at the root; its output, or the test fails with it. ``path``: more places of packages."""
    path = (*path, *filter(None, [os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def stages(output: str) -> dict[str, dict[str, object]]:
    """The stages of the document that `posttune run --json` prints, by name."""
    return {stage["name"]: stage for stage in json.loads(output)["stages"]}


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's rows."""
    folder = tmp_path_factory.mktemp("sums")
    run("configs/quickstart/make_data.py", folder)
    return folder


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_it_is_valid(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    without = ["rl.rollout={name: hf}"] if recipe.name in ENGINES else []
    assert check_config(recipe, without).config.output.startswith("runs/")
    assert load_config(recipe).config.output.startswith("runs/")


def test_the_rows_are_right_and_no_test_prompt_is_trained_on(sums: Path) -> None:
    files = {name: rows(sums / f"{name}.jsonl") for name in SIZES}
    assert {name: len(found) for name, found in files.items()} == SIZES
    questions = {name: {row["question"] for row in found} for name, found in files.items()}
    assert {name: len(found) for name, found in questions.items()} == SIZES
    assert not (questions["test"] | questions["dev"]) & (questions["train"] | questions["prompts"])
    assert not questions["test"] & questions["dev"]
    for row in files["test"] + files["prompts"]:
        left, right = row["question"].removesuffix("=").split("+")
        assert int(row["answer"]) == int(left) + int(right)


def test_the_rows_depend_on_the_seed_alone(sums: Path, tmp_path: Path) -> None:
    run("configs/quickstart/make_data.py", tmp_path / "same")
    run("configs/quickstart/make_data.py", tmp_path / "other", "--seed", "1")
    first = (sums / "test.jsonl").read_bytes()
    assert (tmp_path / "same/test.jsonl").read_bytes() == first
    assert (tmp_path / "other/test.jsonl").read_bytes() != first


@pytest.mark.slow
def test_the_quickstart_runs_and_its_export_answers(sums: Path, tmp_path: Path) -> None:
    sources = [f"{name}.source={sums / name}.jsonl" for name in SIZES]
    small = ("sft.steps=6", "sft.evaluate.every=3", "grpo.steps=2", "grpo.batch.prompts=4")
    limits = ("before.data={path: test, limit: 16}", "after.data={path: test, limit: 16}")
    output = run(
        *("-m", "posttune", "run", "configs/quickstart.yaml", "--json"),
        *(f"output={tmp_path / 'run'}", *sources, *small, *limits),
    )
    done = stages(output)
    assert list(done) == ["train", "dev", "prompts", "test", "sft", "before", "grpo", "after", "export"]
    answer = run("configs/quickstart/answer.py", tmp_path / "run/export", "1+2=")
    assert answer.startswith("1+2= ")


@pytest.mark.slow
def test_the_gsm8k_recipe_runs_with_a_tiny_model(tmp_path: Path) -> None:
    from posttune.testing.tiny import tiny_model

    model = tiny_model(tmp_path / "model")
    for name in ("train", "test"):
        text = [
            json.dumps(
                {
                    "question": f"What is {n} + 1?",
                    "answer": f"It is {n} + 1 = <<{n}+1={n + 1}>>.\n#### {n + 1}",
                }
            )
            for n in range(24)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(text) + "\n", encoding="utf-8")
    sources = [f"{name}.source={tmp_path / name}.jsonl" for name in ("train", "test")]
    models = [f"train.tokenizer={model}", f"test.tokenizer={model}", f"sft.model.path={model}"]
    small = ("sft.steps=2", "grpo.steps=1", "grpo.batch.prompts=2", "grpo.rollout.sampling.max_new_tokens=8")
    limits = [f"{name}.data.limit=4" for name in ("before", "after")]
    limits += [f"{name}.rollout.sampling.max_new_tokens=8" for name in ("before", "after")]
    output = run(
        *("-m", "posttune", "run", "configs/gsm8k_smollm2.yaml", "--json"),
        *(f"output={tmp_path / 'run'}", *sources, *models, *small, *limits),
    )
    assert list(stages(output)) == ["train", "test", "sft", "before", "grpo", "after", "export"]
    assert (tmp_path / "run/export/config.json").is_file()


ALGORITHMS = ("ppo", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "dapo", "gspo")


@pytest.fixture(scope="module")
def toy(sums: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model, and the quickstart's prompts as a dataset."""
    from posttune.data.conversion import ConvertRequest, convert
    from posttune.testing.tiny import tiny_model

    folder = tmp_path_factory.mktemp("algorithms")
    roles = {"prompt": "question", "reference": "answer"}
    convert(ConvertRequest([sums / "dev.jsonl"], folder / "data", map=roles))
    return tiny_model(folder / "model"), folder / "data"


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_recipe_of_an_algorithm_runs(name: str, toy: tuple[Path, Path], tmp_path: Path) -> None:
    model, data = toy
    digit = tmp_path / "digit.py"  # what a random model does now and then, so that rewards differ
    digit.write_text(
        "def score(response, reference):\n    return float(any(c.isdigit() for c in response))\n"
    )
    small = ("rl.steps=2", "rl.batch.prompts=4", "rl.evaluate.every=1", "rl.critic.warmup_steps=1")
    output = run(
        *("-m", "posttune", "run", f"configs/{name}.yaml", "--json", f"output={tmp_path / 'run'}"),
        *(f"rl.model={model}", f"rl.data={data}", f"rl.evaluate.data={{path: {data}, limit: 4}}"),
        *(f"rl.rewards.0.options.path={digit}:score", *small[: 4 if name == "ppo" else 3]),
    )
    assert list(stages(output)) == ["rl", "export"]
    lines = (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert (tmp_path / "run/export/model.safetensors").is_file()


@pytest.fixture(scope="module")
def small_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the 7B recipes' architecture and type, with two small layers."""
    folder = tmp_path_factory.mktemp("qwen") / "model"
    run("benchmarks/random_model.py", folder, "--shape", "tiny")
    return folder


def on_a_cpu(recipe: str) -> list[str]:
    """What the recipe of 7B needs to run here; hf computes with the policy's weights, which so never wait."""
    changes = ["rl.rollout={name: hf, sampling: {n: 2, max_new_tokens: 8}}", "rl.batch.prompts=2"]
    return [*changes, *(["rl.memory.offload=[critic]"] if recipe == "ppo_7b_one_gpu.yaml" else [])]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted(ENGINES))
def test_the_recipe_of_7b_runs_with_a_tiny_model(recipe: str, small_qwen: Path, tmp_path: Path) -> None:
    text = [json.dumps({"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"}) for n in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(text) + "\n", encoding="utf-8")
    output = run(
        *("-m", "posttune", "run", f"configs/{recipe}", "--json", f"output={tmp_path / 'run'}"),
        *(f"prompts.source={tmp_path / 'train.jsonl'}", f"prompts.tokenizer={small_qwen}"),
        *(f"rl.model.path={small_qwen}", "rl.steps=2", "rl.critic.warmup_steps=1", *on_a_cpu(recipe)),
        path=OPTIMIZERS,
    )
    assert list(stages(output)) == ["prompts", "rl"]
    first, second = rows(tmp_path / "run/metrics.jsonl")
    assert "loss/value" in first
    assert "loss/policy" not in first  # the critic learns alone
    assert "loss/policy" in second
    assert second["update/nonfinite_steps"] == 0
    assert ("memory/offloaded_mb" in second) == (recipe == "ppo_7b_one_gpu.yaml")


@pytest.mark.slow
def test_the_benchmark_of_7b_measures_a_tiny_model(small_qwen: Path, tmp_path: Path) -> None:
    document = tmp_path / "found.json"
    shown = run(
        *("benchmarks/ppo_7b.py", "configs/ppo_7b_one_gpu.yaml", "--model", small_qwen, "--steps", "1"),
        *("--try", "micro_batch_tokens=2048", "--json", document, *on_a_cpu("ppo_7b_one_gpu.yaml")),
        path=OPTIMIZERS,
    )
    found = json.loads(document.read_text(encoding="utf-8"))
    assert json.loads(shown.splitlines()[-1]) == found
    assert found["tokens_per_s"] == found["steps"][-1]["tokens_per_s"] > 0
    assert {"loss/policy", "loss/value"} <= set(found["steps"][0])  # no step is a warm-up's
    assert found["tried"][0]["step"]["tokens_per_s"] > 0
    assert set(found["used_bytes"]) >= {"rollout", "critic", "update"}  # the hand-over may be too short
