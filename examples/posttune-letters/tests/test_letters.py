from typing import ClassVar

from posttune.testing import RewardSuite
from posttune.types import Sample

from posttune_letters import Letters


def test_the_share_of_wanted_letters() -> None:
    reward = Letters(Letters.Config(wanted="ab"))
    samples = [
        Sample(id=str(index), group=0, prompt="Say something.", response=response)
        for index, response in enumerate(["Abba!", "abcd", "xyz", "12"])
    ]
    assert reward.reward_score(samples) == [1.0, 0.5, 0.0, None]


class TestKit(RewardSuite):
    """Everything that holds for this kind, on the plugin as it is installed."""

    name = "letters"
    options: ClassVar = {"wanted": "ou"}
    reference = None
