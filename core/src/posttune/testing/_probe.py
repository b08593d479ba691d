"""A fresh process that composes plugins while heavy libraries cannot be imported.

``python -m posttune.testing._probe ANSWERS`` with a list of {kind, name, options} on stdin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

HEAVY = (
    "accelerate", "bert_score", "datasets", "gguf", "pandas", "peft", "pyarrow", "ray", "scipy", "sglang",
    "sklearn", "sympy", "tensorboard", "torch", "transformers", "vllm", "wandb",
)  # fmt: skip
DEADLINE = 120.0


@dataclass(frozen=True)
class Probed:
    """What a fresh process found: an error, heavy libraries that were asked for, hooks, output."""

    error: str
    heavy: tuple[str, ...]
    hooks: tuple[str, ...]
    stdout: str


_known: dict[str, Probed] = {}


def probe(kind: str, name: str, options: Mapping[str, Any]) -> Probed:
    """What a fresh process makes of a plugin and its options; asked once for each."""
    return probe_all([(kind, name, options)])[0]


def probe_all(wanted: Sequence[tuple[str, str, Mapping[str, Any]]]) -> list[Probed]:
    """As ``probe``, one process for all that are not known yet."""
    keys = [json.dumps([kind, name, dict(options), sys.path], default=str) for kind, name, options in wanted]
    new = [each for each, key in zip(wanted, keys, strict=True) if key not in _known]
    for each, found in zip([key for key in keys if key not in _known], _ask(new), strict=True):
        _known[each] = found
    return [_known[key] for key in keys]


def _ask(wanted: Sequence[tuple[str, str, Mapping[str, Any]]]) -> list[Probed]:
    if not wanted:
        return []
    question = [{"kind": kind, "name": name, "options": dict(options)} for kind, name, options in wanted]
    with tempfile.TemporaryDirectory(prefix="posttune-kit-") as folder:
        answers = Path(folder, "answers.jsonl")
        answers.touch()
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(answers)],
            input=json.dumps(question, default=str),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    found = [
        Probed(line["error"], tuple(line["heavy"]), tuple(line["hooks"]), line["stdout"]) for line in lines
    ]
    died = Probed(f"the process ended with {done.returncode}: {done.stderr[-500:]}", (), (), done.stdout)
    return found + [died] * (len(wanted) - len(found))


class _Blocker(MetaPathFinder, Loader):
    """Lets heavy libraries be found, refuses to load them, and remembers which were asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """None for all that may be imported, and for what is not there."""
        heavy = fullname.partition(".")[0] in HEAVY
        return ModuleSpec(fullname, self) if heavy and PathFinder.find_spec(fullname, path, target) else None

    def exec_module(self, module: ModuleType) -> None:
        """Never reached: no module is made."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Refuse."""
        self.asked.append(spec.name)
        raise ModuleNotFoundError(f"{spec.name} must not be imported before it is used", name=spec.name)


def main(answers: str) -> None:
    """Answer every question in a line of its own."""
    from posttune.testing._streams import stdout_of

    blocker = _Blocker()
    sys.meta_path.insert(0, blocker)
    for question in json.load(sys.stdin):
        blocker.asked.clear()
        with stdout_of() as output:
            error, hooks = _compose(question)
        found = {"error": error, "heavy": sorted(set(blocker.asked)), "hooks": hooks, "stdout": output.text}
        with Path(answers).open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")


def _compose(question: Mapping[str, Any]) -> tuple[str, list[str]]:
    from posttune.config.base import PluginRef
    from posttune.errors import PosttuneError
    from posttune.hooks import hooks_of
    from posttune.pipeline import compose

    kind = question["kind"]
    try:
        (member,) = compose(kind, [PluginRef(name=question["name"], options=question["options"])])
    except PosttuneError as error:
        return str(error), []
    return "", [hook for hook in hooks_of(kind) if member.implements(hook)]


if __name__ == "__main__":
    main(sys.argv[1])
