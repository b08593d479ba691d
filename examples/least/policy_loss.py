from posttune import hookimpl
from posttune.types import LossTraits, TokenLoss


class Reinforce:
    """REINFORCE: -A log p."""

    @hookimpl
    def policy_loss_traits(self):
        return LossTraits()

    @hookimpl
    def policy_loss_compute(self, batch):
        return TokenLoss(-batch.advantages * batch.logp)
