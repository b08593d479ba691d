"""Running rewards over samples: statistics, errors, needs."""

from __future__ import annotations

import pytest
from posttune.config.models import PluginRef
from posttune.errors import ConfigError, DataError, PluginCallError
from posttune.execution.statistics import percentile
from posttune.reward.run import OnError, run_rewards
from posttune.types import Sample

SAMPLES = [Sample(f"f:{i}", i // 2, "p", str(i), "1", {"level": i}) for i in range(4)]


@pytest.fixture
def reward(tmp_path):
    def make(code: str, label: str = "mine") -> PluginRef:
        path = tmp_path / f"{label}.py"
        path.write_text(code)
        return PluginRef(name="function", label=label, options={"path": f"{path}:f"})

    return make


def test_statistics_are_of_the_scored_samples(reward):
    ref = reward("def f(response): return [2.0, None, float('nan'), 4][int(response)]")
    result = run_rewards([ref], SAMPLES)
    assert result.scores == {"mine": [2.0, None, None, 4.0]}
    got = result.tallies["mine"]
    assert (got.mean, got.std, got.min, got.max) == (3.0, 1.0, 2.0, 4.0)
    assert (got.scored, got.unscorable, got.timeouts, got.errors) == (2, 2, 0, 0)


def test_dicts_count_by_their_total(reward):
    got = run_rewards([reward("def f(response): return {'a': int(response), 'b': 1}")], SAMPLES).tallies[
        "mine"
    ]
    assert (got.mean, got.min, got.max) == (2.5, 1.0, 4.0)


def test_nothing_scored_leaves_no_mean(reward):
    got = run_rewards([reward("def f(response): return None")], SAMPLES).tallies["mine"]
    assert (got.mean, got.std, got.min, got.max, got.scored, got.unscorable) == (None, None, None, None, 0, 4)


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_the_slowest_sample_is_known(reward, kind):
    code = f"import time\n{kind} f(response):\n    time.sleep(0.2 * (response == '2'))\n    return 1"
    got = run_rewards([reward(code)], SAMPLES).tallies["mine"]
    assert got.slowest == "f:2"
    assert got.seconds_p50 <= got.seconds_p95 <= got.seconds_max <= got.seconds


def test_a_reward_of_all_samples_shares_its_time_out(reward):
    got = run_rewards(
        [reward("import time\ndef f(samples):\n    time.sleep(0.04)\n    return [1] * 4")], SAMPLES
    )
    times = got.tallies["mine"]
    assert 0 < times.seconds_p50 == times.seconds_max <= times.seconds / 4


FAILING = """
def f(response):
    if response == "1":
        raise ValueError("odd")
    return "x" if response == "3" else 1
"""


def test_an_error_ends_it_unless_something_else_is_asked_for(reward):
    with pytest.raises(PluginCallError, match="odd"):
        run_rewards([reward(FAILING)], SAMPLES)
    masked = run_rewards([reward(FAILING)], SAMPLES, OnError("mask"))
    assert masked.scores["mine"] == [1.0, None, 1.0, None]
    valued = run_rewards([reward(FAILING)], SAMPLES, OnError("value", -1.0))
    assert valued.scores["mine"] == [1.0, -1.0, 1.0, -1.0]
    for result in (masked, valued):
        got = result.tallies["mine"]
        assert (got.scored, got.unscorable, got.errors, got.mean) == (2, 0, 2, 1.0)


def test_rewards_are_checked_before_any_runs(reward, tmp_path):
    marker = tmp_path / "ran"
    first = reward(f"def f(response): open({str(marker)!r}, 'w')", "first")
    lacking = reward("def f(response, levle): return 1", "second")
    with pytest.raises(
        DataError, match=r"reward 'second' needs the column 'levle' \(did you mean 'level'\?\)"
    ):
        run_rewards([first, lacking], SAMPLES)
    with pytest.raises(DataError, match="reward 'gsm8k' needs a reference, and sample x has none"):
        run_rewards([first, PluginRef(name="gsm8k")], [Sample("x", 0, "", "")])
    with pytest.raises(ConfigError, match="2 plugins of this kind are labelled 'first'"):
        run_rewards([first, first], SAMPLES)
    assert not marker.exists()


def test_no_samples(reward):
    got = run_rewards([reward("def f(response): return 1")], []).tallies["mine"]
    assert (got.scored, got.mean, got.seconds_max) == (0, None, 0.0)


def test_percentiles():
    times = [(i + 1) / 100 for i in range(100)]
    assert [percentile(times, share) for share in (0.5, 0.95, 1.0)] == pytest.approx([0.505, 0.9505, 1.0])
    assert (percentile([], 0.5), percentile([3.0], 0.95)) == (0.0, 3.0)
