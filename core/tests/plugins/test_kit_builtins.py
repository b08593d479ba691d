"""Every built-in plugin passes the kit that plugins of others are measured by."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from posttune.catalog import Catalog
from posttune.testing import (
    CheckpointExporterSuite,
    DataConverterSuite,
    ObserverSuite,
    PluginSuite,
    RewardManagerSuite,
    RewardSuite,
)
from posttune.testing._probe import probe_all

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
FUNCTION = f"{HERE / 'kit_functions.py'}"
OPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("reward", "function"): {"path": f"{FUNCTION}:score"},
    ("reward", "format"): {"pattern": r"\d+"},
    ("reward", "length"): {"target": 10},
    ("reward", "http"): {"url": "http://localhost:9/score"},
    ("reward", "model"): {"path": "nowhere"},
    ("reward_manager", "gated"): {"gate": "first"},
    ("reward_manager", "overlong"): {"max_length": 5, "buffer": 2},
    ("reward_manager", "function"): {"path": f"{FUNCTION}:Combine"},
}


def entries() -> list[tuple[str, str]]:
    """Every built-in plugin."""
    return [(entry.kind, entry.name) for entry in Catalog().entries() if entry.distribution == "posttune"]


def options_of(kind: str, name: str) -> Mapping[str, Any]:
    return OPTIONS.get((kind, name), {})


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> None:
    """All of them are probed in one fresh process."""
    probe_all([(kind, name, options_of(kind, name)) for kind, name in entries()])


@pytest.mark.parametrize(("kind_of_plugin", "plugin"), entries(), ids=lambda part: str(part))
class TestEvery(PluginSuite):
    """What holds for every plugin, for every built-in one."""

    @pytest.fixture(autouse=True)
    def _choose(self, kind_of_plugin: str, plugin: str) -> None:
        self.kind, self.name = kind_of_plugin, plugin  # type: ignore[misc]
        self.options = options_of(kind_of_plugin, plugin)


def checks_of_kind(suite: type) -> list[str]:
    """The checks that a suite adds to those that hold for every plugin."""
    common = {name for name in dir(PluginSuite) if name.startswith("test_")}
    return sorted(name for name in dir(suite) if name.startswith("test_") and name not in common)


REWARDS: dict[str, dict[str, Any]] = {
    "gsm8k": {"reference": "#### 42", "requires": RewardSuite.requires | {"unscorable"}},
    "format": {},
    "length": {},
    "function": {},
}
MANAGERS: dict[str, dict[str, Any]] = {
    "weighted_sum": {},
    "gated": {},
    "overlong": {},
    "function": {},
    "per_dimension": {"requires": RewardManagerSuite.requires | {"dimensions"}},
}
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
CONVERTERS: dict[str, dict[str, Any]] = {
    "prompt_response": {
        "good": ({"prompt": "1+1?", "response": "2"}, {"prompt": "é 🙂", "response": "x\ny"}),
        "bad": ({"prompt": [3], "response": "2"}, {"prompt": None, "response": "2"}),
    },
    "preference": {
        "good": ({"prompt": "p", "chosen": "good", "rejected": "bad"},),
        "bad": ({"prompt": "p", "chosen": "same", "rejected": {}}, {"prompt": "p"}),
    },
    "messages": {"good": ({"messages": TURNS},), "bad": ({"messages": "text"}, {"messages": []})},
    "sharegpt": {
        "good": ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},),
        "bad": ({"conversations": [{"from": 3, "value": "Hi"}]}, {"conversations": 7}),
    },
    "alpaca": {
        "good": (
            {"instruction": "Add", "input": "1 1", "output": "2"},
            {"instruction": "Say", "output": "a"},
        ),
        "bad": ({"instruction": None, "output": "a"}, {"input": "x"}),
    },
    "text": {"good": ({"text": "Once upon a time."},), "bad": ({"text": [3]}, {})},
    "gsm8k": {
        "good": ({"question": "1+1?", "answer": "It is 2.\n#### 2"},),
        "bad": ({"question": "1+1?", "answer": "no mark"}, {"question": {}, "answer": "#### 2"}),
    },
    "math": {
        "good": ({"problem": "1+1?", "solution": "So \\boxed{2}."},),
        "bad": ({"problem": [], "solution": "So \\boxed{2}."}, {}),
    },
}
OBSERVERS: dict[str, dict[str, Any]] = {
    "jsonl": {},
    "rollouts": {},
    "console": {"requires": ObserverSuite.requires - {"silent"}},
}


class _Chosen:
    """Takes what a table says of a plugin."""

    @pytest.fixture(autouse=True)
    def _choose(self, case: tuple[str, Mapping[str, Any]]) -> None:
        self.name, said = case
        self.options = options_of(self.kind, self.name)  # type: ignore[attr-defined]
        for key, value in said.items():
            setattr(self, key, value)


def cases(table: Mapping[str, Mapping[str, Any]]) -> Any:
    return pytest.mark.parametrize("case", list(table.items()), ids=lambda case: case[0])


def _without_common(suite: type) -> type:
    """The suite without what `TestEvery` has checked."""
    common = [name for name in dir(PluginSuite) if name.startswith("test_")]
    return type(suite.__name__, (suite,), dict.fromkeys(common))


@cases(REWARDS)
class TestRewards(_Chosen, _without_common(RewardSuite)):  # type: ignore[misc]
    """The built-in rewards that need neither a server nor a model."""


@cases(MANAGERS)
class TestManagers(_Chosen, _without_common(RewardManagerSuite)):  # type: ignore[misc]
    """All built-in managers."""


@cases(CONVERTERS)
class TestConverters(_Chosen, _without_common(DataConverterSuite)):  # type: ignore[misc]
    """All built-in converters."""


@cases(OBSERVERS)
class TestObservers(_Chosen, _without_common(ObserverSuite)):  # type: ignore[misc]
    """The built-in observers."""


@pytest.mark.slow
class TestHF(_without_common(CheckpointExporterSuite)):  # type: ignore[misc]
    """The exporter of Hugging Face folders."""

    name = "hf"


def test_every_built_in_one_is_measured() -> None:
    """A new built-in reward, manager, converter or observer needs its row here."""
    tables = {"reward": REWARDS, "reward_manager": MANAGERS, "data_converter": CONVERTERS}
    elsewhere = {("reward", "http"), ("reward", "model")}
    missing = [
        (kind, name)
        for kind, name in entries()
        if kind in tables and name not in tables[kind] and (kind, name) not in elsewhere
    ]
    assert missing == []


@pytest.mark.parametrize(
    "suite",
    [RewardSuite, RewardManagerSuite, DataConverterSuite, ObserverSuite, CheckpointExporterSuite],
    ids=lambda suite: suite.__name__,
)
def test_each_suite_has_about_fifteen_checks_and_more(suite: type) -> None:
    assert len(checks_of_kind(suite)) >= 12
