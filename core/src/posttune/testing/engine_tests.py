"""What the tests of an engine's plugin share, beyond the rollout suite."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from posttune.config.models import PluginRef
from posttune.engines import installed
from posttune.errors import PosttuneError, RunError
from posttune.facade import RolloutEngine, build_rollout
from posttune.types import Completion, Request, Resources, RolloutContext, Sampling

GREEDY = Sampling(temperature=0, max_new_tokens=8)
ASKED = [Request(f"r{i}", tuple(range(40 + i, 50)), 7 * i) for i in range(4)]
LEAST_WEIGHTS = 3 << 18  # several buckets of a megabyte


def context(folder: Path | None, **fields: Any) -> RolloutContext:
    """Of a run on a CPU in float32."""
    plain = RolloutContext(folder, None, "float32", "cpu", 0, 64, Resources(max_sequences=8))
    return replace(plain, **fields)


@contextmanager
def started(
    backend: str, folder: Path | None, told: RolloutContext | None = None, **options: Any
) -> Iterator[RolloutEngine]:
    """The engine of a model's folder, stopped afterwards."""
    with build_rollout(PluginRef(name=backend, options=options)) as made:
        made.start(told or context(folder))
        yield made


def refused(
    backend: str, folder: Path | None, told: RolloutContext | None = None, **options: Any
) -> PosttuneError:
    """The error of a start that must fail, which says what to do next."""
    with pytest.raises(PosttuneError) as caught, started(backend, folder, told, **options):
        pass
    assert "next: " in str(caught.value)
    return caught.value


def assert_likeliest(model: Any, answers: Sequence[Completion]) -> None:
    """Every token of answers to ``ASKED`` is the model's own argmax, or as good as it."""
    import torch

    assert answers
    prompts = {request.id: request.prompt_ids for request in ASKED}
    for answer in answers:
        prompt = prompts[answer.request_id]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *answer.token_ids]]), use_cache=False).logits[0]
        rows = logits[len(prompt) - 1 : -1]
        chosen = rows.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert float((rows.max(-1).values - chosen).max()) < 1e-3


def assert_mended(made: RolloutEngine, model: Any) -> list[Completion]:
    """A load that breaks off in the middle stops the engine's answers, and the next load mends it.

    ``made`` takes buckets of a megabyte and compares checksums. Returns its answers with the last weights.
    """
    import torch

    good = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    assert sum(tensor.numel() for tensor in good.values()) > LEAST_WEIGHTS
    made.load_weights(iter(good.items()), 1)
    broken = [(name, good[name]) for name in list(good)[:-2]]
    broken.append(("model.nrom.weight", good["model.norm.weight"]))
    with pytest.raises(RunError, match=r"did you mean 'model\.norm\.weight'"):
        made.load_weights(iter(broken), 2)
    with pytest.raises(RunError, match="holds a mixture"):
        made.generate(ASKED, GREEDY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    made.load_weights(iter(model.state_dict().items()), 3)
    answers = made.generate(ASKED, GREEDY)
    assert_likeliest(model, answers)
    return answers


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    versions: Mapping[str, str],
    requires: Mapping[str, list[str]],
    package: Path,
    files: Mapping[str, str],
) -> None:
    """An environment with these distributions alone, and an engine whose package has these files.

    ``versions`` and ``requires`` by the name of the distribution, ``files`` by their place in the package.
    """
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text, "utf-8")

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    def spec(name: str) -> ModuleSpec | None:
        found = ModuleSpec(name, None, is_package=True)
        found.submodule_search_locations = [str(package)]
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", requires.get)
    monkeypatch.setattr(installed, "find_spec", spec)
