"""For each check of the kit a planted fault that it must catch, and a sound plugin that it must pass."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plugin_wheels import Install, Source, plugin
from posttune.errors import DataError, PosttuneError
from posttune.hookspecs import hookimpl
from posttune.pipeline import bind
from posttune.testing import (
    DataConverterSuite,
    ObserverSuite,
    PluginSuite,
    RewardManagerSuite,
    RewardSuite,
)
from posttune.types import BadRow, Location, Needs, Record, Reward, Roles, Sample, SourceRow

COMMON = {name for name in dir(PluginSuite) if name.startswith("test_")}


def own_checks(suite: type) -> set[str]:
    return {name for name in dir(suite) if name.startswith("test_")} - COMMON


def planted(suite: type, make: type, **said: Any) -> Any:
    """The suite over an instance that is made by hand, without an entry point."""
    kind = suite.kind  # type: ignore[attr-defined]

    def member(self: Any) -> Any:
        return bind(kind, make(), "planted")

    return type("Planted", (suite,), {"member": member, "name": "planted", **said})()


def fails(suite: Any, check: str) -> bool:
    """Whether the check objects. Any error that pytest would show counts."""
    try:
        getattr(suite, check)()
    except (AssertionError, PosttuneError, IndexError):
        return True
    return False


# --- what holds for every plugin ----------------------------------------------------------------

SOUND = '''
from pydantic import BaseModel, Field
from posttune import hookimpl

class Plugin:
    """Rewards a word."""

    class Config(BaseModel, extra="forbid"):
        word: str = Field("so", description="The word.")

    def __init__(self, config):
        self.config = config

    @hookimpl
    def reward_score(self, samples):
        return [float(self.config.word in sample.response) for sample in samples]
'''


def changed(old: str, new: str) -> Source:
    assert old in SOUND
    return plugin("planted", "reward", SOUND.replace(old, new))


IN_INIT = "        self.config = config\n"
TRIES = "try:\n    import sympy\nexcept ImportError:\n    pass\n"
ONLY_HERE = "        import sys\n        assert 'pytest' in sys.modules, 'only here'\n"
EXITS = """        def model_post_init(self, context):
            if not self.word:
                raise SystemExit(3)

    def __init__"""
SHARES = SOUND.replace("class Plugin:", "SHARED = {}\n\nclass Plugin:")
NAMED = {"reward": {"Planted-One": "posttune_planted:Plugin"}}
NO_CLASS = {"reward": {"planted": "posttune_planted:hookimpl"}}

FAULTS: dict[str, Source] = {
    "test_entry_point_resolves": replace(plugin("planted", "reward", SOUND), plugins=NO_CLASS),
    "test_name_is_a_word": replace(plugin("planted", "reward", SOUND), plugins=NAMED),
    "test_range_of_posttune_is_said": plugin("planted", "reward", SOUND, requires=("posttune>=0.1",)),
    "test_import_is_light": changed("from pydantic", f"{TRIES}from pydantic"),
    "test_composes_in_a_fresh_process": changed(IN_INIT, IN_INIT + ONLY_HERE),
    "test_composing_prints_nothing": changed("class Plugin", "print('hello')\n\nclass Plugin"),
    "test_only_hooks_of_its_kind_and_all_marked": changed(
        "    @hookimpl\n", "    def reward_needs(self): ...\n\n    @hookimpl\n"
    ),
    "test_unknown_option_is_refused": changed(', extra="forbid"', ""),
    "test_options_are_documented": changed('Field("so", description="The word.")', '"so"'),
    "test_options_survive_json": changed('description="The word."', 'description="The word.", exclude=True'),
    "test_it_says_what_it_does": changed('    """Rewards a word."""\n\n', ""),
    "test_composes_twice": plugin(
        "planted", "reward", SHARES.replace(IN_INIT, IN_INIT + "        self.seen = SHARED\n")
    ),
    "test_wrong_options_are_refused_by_name": changed("    def __init__", EXITS),
}


def common(name: str = "planted", **options: Any) -> Any:
    return type("Planted", (PluginSuite,), {"kind": "reward", "name": name, "options": options})()


@pytest.mark.parametrize("check", sorted(COMMON))
def test_what_holds_for_every_plugin_is_checked(check: str, install: Install) -> None:
    source = FAULTS[check]
    install(source)
    (name,) = source.plugins["reward"]
    options = {"word": "other"} if "json" in check else {}
    assert fails(common(name, **options), check)


def test_a_sound_plugin_passes_all_of_it(install: Install) -> None:
    install(plugin("planted", "reward", SOUND))
    for check in sorted(COMMON):
        getattr(common(), check)()


# --- rewards -------------------------------------------------------------------------------------


class SoundReward:
    """1 for every word "so"; a reference is needed."""

    @hookimpl
    def reward_needs(self) -> Needs:
        return Needs(reference=True)

    @hookimpl
    def reward_score(self, samples: Sequence[Sample]) -> list[float | None]:
        return [self.one(sample) for sample in samples]

    def one(self, sample: Sample) -> float | None:
        return None if sample.reference is None else float(len(sample.response))


class Misses(SoundReward):
    @hookimpl
    def reward_score(self, samples: Sequence[Sample]) -> list[float | None]:
        return [self.one(sample) for sample in samples if sample.response]


class Sorted(SoundReward):
    @hookimpl
    def reward_score(self, samples: Sequence[Sample]) -> list[float | None]:
        return [self.one(sample) for sample in sorted(samples, key=lambda each: each.id)]


class Relative(SoundReward):
    @hookimpl
    def reward_score(self, samples: Sequence[Sample]) -> list[float | None]:
        scores = [self.one(sample) or 0.0 for sample in samples]
        return [score - sum(scores) / max(len(scores), 1) for score in scores]


class Drifting(SoundReward):
    def __init__(self) -> None:
        self.calls = 0.0

    def one(self, sample: Sample) -> float | None:
        self.calls += 1.0
        return self.calls


class Peeks(SoundReward):
    @hookimpl
    def reward_score(self, samples: Sequence[Sample]) -> list[float | None]:
        return [self.one(samples[0])] * len(samples)


class Divides(SoundReward):
    def one(self, sample: Sample) -> float | None:
        return 1.0 / len(sample.response)


class Slow(SoundReward):
    def one(self, sample: Sample) -> float | None:
        time.sleep(5 if len(sample.response) > 1000 else 0)
        return 0.0


class OneAtATime(SoundReward):
    busy = False

    def one(self, sample: Sample) -> float | None:
        if self.busy:
            return -1.0
        self.busy = True
        time.sleep(0.01)
        self.busy = False
        return float(len(sample.response))


class KnowsItsProcess(SoundReward):
    def one(self, sample: Sample) -> float | None:
        return float("pytest" in sys.modules)


class Writes(SoundReward):
    def one(self, sample: Sample) -> float | None:
        sample.columns["seen"] = True  # type: ignore[index]
        return 0.0


class Greedy(SoundReward):
    @hookimpl
    def reward_needs(self) -> Needs:
        return Needs(columns=("topic",))


class ZeroForUnknown(SoundReward):
    def one(self, sample: Sample) -> float | None:
        return 0.0


class Prints(SoundReward):
    def one(self, sample: Sample) -> float | None:
        print("scoring")
        return 0.0


REWARD_FAULTS: dict[str, type] = {
    "test_one_score_for_each_sample": Misses,
    "test_order_is_that_of_the_samples": Sorted,
    "test_a_score_does_not_depend_on_its_neighbours": Relative,
    "test_it_repeats_itself": Drifting,
    "test_no_samples": Peeks,
    "test_empty_response": Divides,
    "test_it_works_in_threads": OneAtATime,
    "test_it_leaves_samples_alone": Writes,
    "test_needs_are_true": Greedy,
    "test_unscorable_is_not_zero": ZeroForUnknown,
    "test_scoring_prints_nothing": Prints,
}
IN_PROCESSES = {
    "test_long_response": "import time\n" + SOUND.replace(
        "return [float", "time.sleep(8 if len(samples[0].response) > 1000 else 0)\n        return [float"
    ),
    "test_every_executor_scores_alike": "import sys\n" + SOUND.replace(
        "self.config.word in sample.response", "'pytest' in sys.modules"
    ),
    "test_a_hang_is_ended": SOUND,
}  # fmt: skip
ALL_OF_REWARDS = RewardSuite.requires | {"unscorable"}


@pytest.mark.parametrize("check", sorted(REWARD_FAULTS))
def test_faults_of_rewards_are_caught(check: str) -> None:
    assert fails(planted(RewardSuite, REWARD_FAULTS[check], requires=ALL_OF_REWARDS), check)


@pytest.mark.slow
@pytest.mark.parametrize("check", sorted(IN_PROCESSES))
def test_faults_of_rewards_in_worker_processes_are_caught(
    check: str, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttune.testing import reward_suite

    monkeypatch.setattr(reward_suite, "DEADLINE", 4.0)
    install(plugin("planted", "reward", IN_PROCESSES[check]))
    said = {"name": "planted", "requires": RewardSuite.requires | {"hang"}}
    assert fails(type("Planted", (RewardSuite,), said)(), check)


@pytest.mark.slow
def test_a_sound_reward_passes(install: Install) -> None:
    body = SOUND.replace(
        "return [float",
        "[each for each in samples if each.prompt == 'hang' and self.hang()]\n        return [float",
    )
    body += "\n    def hang(self):\n        while True:\n            pass\n"
    install(plugin("planted", "reward", body))

    class Sound(RewardSuite):
        name = "planted"
        requires = ALL_OF_REWARDS - {"unscorable"} | {"hang"}

        def hanging(self) -> Sample:
            return replace(self.sample("never"), prompt="hang")

    for check in sorted(own_checks(RewardSuite)):
        getattr(Sound(), check)()
    for check in sorted(REWARD_FAULTS):
        getattr(planted(RewardSuite, SoundReward, requires=ALL_OF_REWARDS), check)()


def test_every_check_of_rewards_has_a_fault() -> None:
    assert own_checks(RewardSuite) == REWARD_FAULTS.keys() | IN_PROCESSES.keys()


# --- managers ------------------------------------------------------------------------------------


class SoundManager:
    """The sum of the scores; none where one is missing."""

    @hookimpl
    def reward_manager_combine(self, samples: Any, scores: Any) -> list[Reward]:
        return [self.one(samples, scores, at) for at in range(len(samples))]

    def one(self, samples: Any, scores: Any, at: int) -> Reward:
        row = [self.number(column[at]) for column in scores.values()]
        return Reward(None if None in row else sum(each for each in row if each is not None))

    def number(self, score: Any) -> float | None:
        return sum(score.values()) if isinstance(score, Mapping) else score


class Short(SoundManager):
    @hookimpl
    def reward_manager_combine(self, samples: Any, scores: Any) -> list[Reward]:
        return [self.one(samples, scores, at) for at in range(len(samples) - 1)]


class NeedsOne(SoundManager):
    @hookimpl
    def reward_manager_combine(self, samples: Any, scores: Any) -> list[Reward]:
        first = next(iter(scores.values()))[0]
        return [Reward(first) for _ in samples]


class ByRank(SoundManager):
    def one(self, samples: Any, scores: Any, at: int) -> Reward:
        return Reward(float(at))


class Centred(SoundManager):
    def one(self, samples: Any, scores: Any, at: int) -> Reward:
        column = [score or 0.0 for score in next(iter(scores.values()))]
        return Reward(column[at] - sum(column) / len(column))


class FirstLabel(SoundManager):
    def one(self, samples: Any, scores: Any, at: int) -> Reward:
        return Reward(next(iter(scores.values()))[at])


class Constant(SoundManager):
    def one(self, samples: Any, scores: Any, at: int) -> Reward:
        return Reward(1.0)


class ZeroForNone(SoundManager):
    def number(self, score: Any) -> float | None:
        return 0.0 if score is None else score


class Adds(SoundManager):
    def one(self, samples: Any, scores: Any, at: int) -> Reward:
        return Reward(sum(column[at] for column in scores.values()))


class NumbersOnly(SoundManager):
    def number(self, score: Any) -> float | None:
        return score + 0.0 if score is not None else None


class OneToken(SoundManager):
    def one(self, samples: Any, scores: Any, at: int) -> Reward:
        return Reward(1.0, per_token=(1.0,))


class Counts(SoundManager):
    calls = 0.0

    def one(self, samples: Any, scores: Any, at: int) -> Reward:
        Counts.calls += 1.0
        return Reward(Counts.calls)


class Fills(SoundManager):
    def one(self, samples: Any, scores: Any, at: int) -> Reward:
        for column in scores.values():
            column[at] = 0.0
        return Reward(0.0)


class Chatty(SoundManager):
    def one(self, samples: Any, scores: Any, at: int) -> Reward:
        print(at)
        return Reward(0.0)


MANAGER_FAULTS: dict[str, type] = {
    "test_one_reward_for_each_sample": Short,
    "test_no_samples": NeedsOne,
    "test_order_is_that_of_the_samples": ByRank,
    "test_a_reward_does_not_depend_on_its_neighbours": Centred,
    "test_order_of_the_rewards_does_not_matter": FirstLabel,
    "test_scores_matter": Constant,
    "test_unscorable_is_no_number": ZeroForNone,
    "test_a_missing_score_is_survived": Adds,
    "test_dimensions": NumbersOnly,
    "test_empty_response": OneToken,
    "test_it_repeats_itself": Counts,
    "test_it_leaves_its_input_alone": Fills,
    "test_combining_prints_nothing": Chatty,
}
ALL_OF_MANAGERS = RewardManagerSuite.requires | {"dimensions"}


@pytest.mark.parametrize("check", sorted(own_checks(RewardManagerSuite)))
def test_faults_of_managers_are_caught(check: str) -> None:
    assert fails(planted(RewardManagerSuite, MANAGER_FAULTS[check], requires=ALL_OF_MANAGERS), check)
    getattr(planted(RewardManagerSuite, SoundManager, requires=ALL_OF_MANAGERS), check)()


# --- converters ----------------------------------------------------------------------------------

GOOD = ({"prompt": "1+1?", "response": "2"}, {"prompt": "é 🙂", "response": "x"})
BAD = ({"prompt": 3}, {})


class SoundConverter:
    """A prompt, and perhaps a response."""

    @hookimpl
    def data_converter_roles(self) -> Roles:
        return Roles(required=("prompt",), optional=("response",))

    @hookimpl
    def data_converter_convert(
        self, rows: Iterable[SourceRow], columns: Mapping[str, str]
    ) -> Iterator[Record | BadRow]:
        for row in rows:
            yield self.one(row)

    def one(self, row: SourceRow) -> Record | BadRow:
        prompt, response = row.data.get("prompt"), row.data.get("response")
        if not isinstance(prompt, str) or not isinstance(response, str):
            return BadRow(row.location, "needs two texts")
        return Record(row.location, prompt=prompt, response=response)


class Refuses(SoundConverter):
    def one(self, row: SourceRow) -> Record | BadRow:
        return BadRow(row.location, "no")


class NoPrompt(SoundConverter):
    def one(self, row: SourceRow) -> Record | BadRow:
        return Record(row.location, response="x")


class OddRoles(SoundConverter):
    @hookimpl
    def data_converter_roles(self) -> Roles:
        return Roles(required=("prompt",), optional=("question",))


class TakesAll(SoundConverter):
    def one(self, row: SourceRow) -> Record | BadRow:
        return Record(row.location, prompt=str(row.data.get("prompt")))


class StopsShort(SoundConverter):
    @hookimpl
    def data_converter_convert(self, rows: Any, columns: Any) -> Iterator[Record | BadRow]:
        bad = False
        for row in rows:
            found = self.one(row)
            bad = bad or isinstance(found, BadRow)
            yield BadRow(row.location, "after a bad row") if bad else found


class Backwards(SoundConverter):
    @hookimpl
    def data_converter_convert(self, rows: Any, columns: Any) -> Iterator[Record | BadRow]:
        yield from [self.one(row) for row in rows][::-1]


class WantsARow(SoundConverter):
    @hookimpl
    def data_converter_convert(self, rows: Any, columns: Any) -> Iterator[Record | BadRow]:
        found = [self.one(row) for row in rows]
        yield found[0]
        yield from found[1:]


class Trusts(SoundConverter):
    def one(self, row: SourceRow) -> Record | BadRow:
        return Record(row.location, prompt=row.data["prompt"].strip(), response=row.data.get("response"))


class Gathers(SoundConverter):
    @hookimpl
    def data_converter_convert(self, rows: Any, columns: Any) -> Iterator[Record | BadRow]:
        yield from [self.one(row) for row in rows]


class Numbers(SoundConverter):
    count = 0

    def one(self, row: SourceRow) -> Record | BadRow:
        Numbers.count += 1
        return Record(row.location, prompt=f"{Numbers.count}")


class Strips(SoundConverter):
    def one(self, row: SourceRow) -> Record | BadRow:
        row.data["seen"] = True  # type: ignore[index]
        return super().one(row)


class Loud(SoundConverter):
    def one(self, row: SourceRow) -> Record | BadRow:
        print(row.location)
        return super().one(row)


class Elsewhere(SoundConverter):
    def one(self, row: SourceRow) -> Record | BadRow:
        return Record(Location(row.location.file, row.location.row + 1), prompt="x")


CONVERTER_FAULTS: dict[str, type] = {
    "test_good_rows_become_records": Refuses,
    "test_records_have_the_roles_that_it_names": NoPrompt,
    "test_roles_are_roles": OddRoles,
    "test_bad_rows_are_refused_one_by_one": TakesAll,
    "test_a_bad_row_harms_no_other": StopsShort,
    "test_order_is_that_of_the_rows": Backwards,
    "test_no_rows": WantsARow,
    "test_anything_may_stand_in_a_row": Trusts,
    "test_it_streams": Gathers,
    "test_it_repeats_itself": Numbers,
    "test_it_leaves_rows_alone": Strips,
    "test_converting_prints_nothing": Loud,
}


@pytest.mark.parametrize("check", sorted(CONVERTER_FAULTS))
def test_faults_of_converters_are_caught(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttune.data import roles

    monkeypatch.setitem(roles.DEFAULTS, "question", ("question",))
    said = {"good": GOOD, "bad": BAD}
    assert fails(planted(DataConverterSuite, CONVERTER_FAULTS[check], **said), check)
    getattr(planted(DataConverterSuite, SoundConverter, **said), check)()


def test_a_record_of_another_row_is_caught() -> None:
    assert fails(planted(DataConverterSuite, Elsewhere, good=GOOD, bad=BAD), "test_good_rows_become_records")


def test_a_suite_without_rows_is_no_suite() -> None:
    assert fails(planted(DataConverterSuite, SoundConverter), "test_the_suite_has_rows")
    assert fails(planted(DataConverterSuite, SoundConverter, good=GOOD), "test_the_suite_has_rows")


CONVERTER = '''
from posttune import hookimpl
from posttune.types import Record, Roles

class Plugin:
    """Gives the prompt as it stands, and cuts it after the first time."""

    seen = 0

    @hookimpl
    def data_converter_roles(self):
        return Roles(required=("prompt",))

    @hookimpl
    def data_converter_convert(self, rows, columns):
        Plugin.seen += 1
        for row in rows:
            yield Record(row.location, prompt=row.data["prompt"][Plugin.seen:])
'''


def test_what_changes_on_its_way_to_the_disk_is_caught(install: Install) -> None:
    install(plugin("planted", "data_converter", CONVERTER))
    said = {"name": "planted", "good": ({"prompt": "abcdefgh"},)}
    assert fails(type("Planted", (DataConverterSuite,), said)(), "test_records_can_be_stored")
    install(plugin("whole", "data_converter", CONVERTER.replace("Plugin.seen:", "0:")))
    said["name"] = "whole"
    type("Planted", (DataConverterSuite,), said)().test_records_can_be_stored()


def test_every_check_of_converters_has_a_fault() -> None:
    elsewhere = {"test_the_suite_has_rows", "test_records_can_be_stored"}
    assert own_checks(DataConverterSuite) == CONVERTER_FAULTS.keys() | elsewhere


# --- observers -----------------------------------------------------------------------------------


class SoundObserver:
    """Writes the last step into a file of the run folder."""

    folder: Path | None = None

    @hookimpl
    def observer_run_start(self, run: Any) -> None:
        self.folder = run.folder

    @hookimpl
    def observer_step(self, stage: str, step: int, metrics: Any) -> None:
        if self.folder is not None:
            (self.folder / "last.txt").write_text(f"{stage} {step} {len(metrics)}")

    @hookimpl
    def observer_samples(self, stage: str, step: int, table: Any) -> None:
        self.rows = table.num_rows

    @hookimpl
    def observer_checkpoint(self, path: Path, step: int) -> None:
        self.checkpoint = path.name

    @hookimpl
    def observer_run_end(self, outcome: Any) -> None:
        self.folder = None


def observer(**hooks: Any) -> type:
    """The sound one with other hooks."""
    return type("Faulty", (SoundObserver,), {name: hookimpl(hook) for name, hook in hooks.items()})


def _fail(*_: object) -> None:
    raise ValueError("planted")


def _checkpoint(self: Any, path: Path, step: int) -> None:
    raise ValueError(path)


def _start_once(self: Any, run: Any) -> None:
    if self.folder is not None or hasattr(self, "rows"):
        raise ValueError("began twice")
    self.folder = run.folder


def _end_well(self: Any, outcome: Any) -> None:
    if outcome.status != "finished" and hasattr(self, "rows"):
        raise ValueError("did not finish")


def _end_after_start(self: Any, outcome: Any) -> None:
    if self.folder is None:
        raise ValueError("never began")


def _needs_total(self: Any, run: Any) -> None:
    self.folder = run.folder
    self.left = run.total_steps - run.first_step


def _json(self: Any, stage: str, step: int, metrics: Any) -> None:
    import json

    json.dumps(dict(metrics), allow_nan=False)


def _same_keys(self: Any, stage: str, step: int, metrics: Any) -> None:
    if set(metrics) != getattr(self, "keys", set(metrics)):
        raise ValueError("other metrics")
    self.keys = set(metrics)


def _first_row(self: Any, stage: str, step: int, table: Any) -> None:
    table.column("prompt")[0]


def _notes(self: Any, stage: str, step: int, metrics: Any) -> None:
    metrics["seen"] = 1.0


def _here(self: Any, stage: str, step: int, metrics: Any) -> None:
    Path("metrics.txt").write_text("here")


def _says(self: Any, stage: str, step: int, metrics: Any) -> None:
    print(step)


def _removes(self: Any, run: Any) -> None:
    run.folder.unlink(missing_ok=True) if run.folder.is_file() else None
    self.folder = run.folder


class Shares(SoundObserver):
    home: Path | None = None

    @hookimpl
    def observer_run_start(self, run: Any) -> None:
        Shares.home = run.folder

    @hookimpl
    def observer_step(self, stage: str, step: int, metrics: Any) -> None:
        with (Shares.home / "log.txt").open("a") as file:  # type: ignore[operator]
            file.write(f"{step}\n")


OBSERVER_FAULTS: dict[str, type] = {
    "test_a_whole_run": observer(observer_checkpoint=_checkpoint),
    "test_several_stages": observer(observer_run_start=_start_once),
    "test_a_run_that_fails": observer(observer_run_end=_end_well),
    "test_the_end_without_a_start": observer(observer_run_end=_end_after_start),
    "test_a_run_that_is_resumed": observer(observer_run_start=_needs_total),
    "test_any_number_may_come": observer(observer_step=_json),
    "test_metrics_may_come_and_go": observer(observer_step=_same_keys),
    "test_a_step_without_samples": observer(observer_samples=_first_row),
    "test_it_leaves_metrics_alone": observer(observer_step=_notes),
    "test_it_writes_into_the_run_folder_only": observer(observer_step=_here),
    "test_it_prints_nothing": observer(observer_step=_says),
    "test_a_folder_that_is_gone_ends_no_run": observer(observer_run_start=_removes),
    "test_two_runs_at_a_time": Shares,
}


@pytest.mark.parametrize("check", sorted(own_checks(ObserverSuite)))
def test_faults_of_observers_are_caught(check: str) -> None:
    assert fails(planted(ObserverSuite, OBSERVER_FAULTS[check]), check)
    getattr(planted(ObserverSuite, SoundObserver), check)()


# --- estimators and losses: what joins the suites ---------------------------------------------------


def test_what_the_joined_suites_add_is_caught() -> None:
    import torch
    from posttune.testing import AdvantageEstimatorSuite, PolicyLossSuite
    from posttune.types import Advantages, LossTraits, TokenLoss, Traits

    class Estimator:
        """Says so, and gives float64."""

        @hookimpl
        def advantage_estimator_traits(self) -> Traits:
            return Traits()

        @hookimpl
        def advantage_estimator_compute(self, batch: Any) -> Advantages:
            print("computing")
            return Advantages(torch.zeros_like(batch.token_rewards))

    class Loss:
        """Says so, and has no gradient."""

        @hookimpl
        def policy_loss_traits(self) -> LossTraits:
            return LossTraits()

        @hookimpl
        def policy_loss_compute(self, batch: Any) -> TokenLoss:
            print("computing")
            return TokenLoss(torch.zeros_like(batch.logp))

    for suite, faulty in ((AdvantageEstimatorSuite, Estimator), (PolicyLossSuite, Loss)):
        for check in ("test_the_facade_accepts_it", "test_computing_prints_nothing"):
            assert fails(planted(suite, faulty), check)


def test_the_kit_counts_an_error_of_posttune_as_a_failure() -> None:
    class Refusing(SoundReward):
        def one(self, sample: Sample) -> float | None:
            raise DataError("planted")

    assert fails(planted(RewardSuite, Refusing), "test_one_score_for_each_sample")


def test_the_fault_table_is_text_that_compiles() -> None:
    for source in FAULTS.values():
        for text in source.modules.values():
            compile(textwrap.dedent(text), "planted", "exec")
