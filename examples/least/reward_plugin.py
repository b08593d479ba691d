from posttune import BaseRewardFunction


class Polite(BaseRewardFunction):
    """1 where the answer says please."""

    def compute_reward(self, response, **_):
        return float("please" in response)
