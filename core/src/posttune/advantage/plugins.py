"""The built-in advantage estimators: options around the functions of ``advantage.functions``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from posttune.config.models import Fraction, NonNegativeFloat, PositiveFloat, Strict
from posttune.hookspecs import hookimpl
from posttune.types import Traits

if TYPE_CHECKING:
    from posttune.types import AdvantageBatch, Advantages

Ddof = Literal[0, 1]
Gamma = Annotated[float, Field(ge=0, le=1)]

_DDOF = "Variances divide by the count less this."
_EPS_STD = "Added to standard deviations."
_EPS_VAR = "Added to the variance of the whitening."
_WHITEN = "Whiten advantages over the tokens of the batch, on all ranks."


class GroupConfig(Strict):
    """Options of every estimator that compares the answers to one prompt."""

    singleton: Literal["refuse", "zero", "raw"] = Field(
        "refuse",
        description="A group of one sample: refuse such a configuration, give it 0, or its uncentred score. "
        "Under refuse, a group that has one sample left after masking gets 0.",
    )


class Estimator:
    """What the built-in estimators share: their traits are fixed."""

    traits: ClassVar[Traits]

    @hookimpl
    def advantage_estimator_traits(self) -> Traits:
        """What the estimator needs."""
        return self.traits


class GAE(Estimator):
    """Generalised advantage estimation, with a critic (arXiv:1506.02438)."""

    class Config(Strict):
        """Options of ``gae``."""

        gamma: Gamma = Field(1.0, description="Discount of the rewards, per token.")
        lam: Fraction = Field(1.0, description="Decay of the estimator: 0 trusts the critic, 1 the rewards.")
        mask_mode: Literal["carry", "plain", "zero"] = Field(
            "carry",
            description="Tokens inside a response that are not the policy's: step over them, take them for "
            "any other, or take their reward and value for 0.",
        )
        whiten: bool = Field(True, description=_WHITEN)
        ddof: Ddof = Field(1, description=_DDOF)
        eps: NonNegativeFloat = Field(1e-8, description=_EPS_VAR)

    traits = Traits(needs_critic=True, scope="batch")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def advantage_estimator_traits(self) -> Traits:
        """Its statistics range over the batch only where it whitens."""
        return Traits(needs_critic=True, scope="batch" if self.config.whiten else "sequence")

    @hookimpl
    def advantage_estimator_compute(self, batch: AdvantageBatch) -> Advantages:
        """See ``functions.gae``."""
        from posttune.advantage import functions

        return functions.gae(batch, **self.config.model_dump())


class GRPO(Estimator):
    """Group relative policy optimisation (arXiv:2402.03300)."""

    class Config(GroupConfig):
        """Options of ``grpo``."""

        scale: Literal["group", "batch", "none"] = Field(
            "group", description="Divide by the deviation of the group, of the batch, or by nothing."
        )
        ddof: Ddof = Field(1, description=_DDOF)
        eps: NonNegativeFloat = Field(1e-6, description=_EPS_STD)

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def advantage_estimator_traits(self) -> Traits:
        """Its statistics range over the batch where it divides by the batch's deviation."""
        return Traits(needs_groups=True, scope="batch" if self.config.scale == "batch" else "group")

    @hookimpl
    def advantage_estimator_compute(self, batch: AdvantageBatch) -> Advantages:
        """See ``functions.grpo``."""
        from posttune.advantage import functions

        return functions.grpo(batch, **self.config.model_dump())


class DrGRPO(Estimator):
    """GRPO that does not divide by the deviation (arXiv:2503.20783). Use with seq_mean_token_sum_norm."""

    class Config(GroupConfig):
        """Options of ``dr_grpo``."""

    traits = Traits(needs_groups=True, scope="group")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def advantage_estimator_compute(self, batch: AdvantageBatch) -> Advantages:
        """See ``functions.grpo``."""
        from posttune.advantage import functions

        return functions.grpo(batch, scale="none", singleton=self.config.singleton)


class RLOO(Estimator):
    """REINFORCE leave-one-out (arXiv:2402.14740)."""

    class Config(GroupConfig):
        """Options of ``rloo``."""

        standardise: bool = Field(False, description="Then standardise over all samples of the batch.")
        eps: NonNegativeFloat = Field(1e-4, description=_EPS_STD)

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def advantage_estimator_traits(self) -> Traits:
        """Its statistics range over the batch where it standardises."""
        return Traits(needs_groups=True, scope="batch" if self.config.standardise else "group")

    @hookimpl
    def advantage_estimator_compute(self, batch: AdvantageBatch) -> Advantages:
        """See ``functions.rloo``."""
        from posttune.advantage import functions

        return functions.rloo(batch, **self.config.model_dump())


class ReinforcePlusPlus(Estimator):
    """REINFORCE++: discounted returns, whitened over the batch (arXiv:2501.03262)."""

    class Config(Strict):
        """Options of ``reinforce_plus_plus``."""

        gamma: Gamma = Field(1.0, description="Discount of the rewards, per token.")
        whiten: bool = Field(True, description=_WHITEN)
        ddof: Ddof = Field(1, description=_DDOF)
        eps: NonNegativeFloat = Field(1e-8, description=_EPS_VAR)

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def advantage_estimator_traits(self) -> Traits:
        """Its statistics range over the batch only where it whitens."""
        return Traits(scope="batch" if self.config.whiten else "sequence")

    @hookimpl
    def advantage_estimator_compute(self, batch: AdvantageBatch) -> Advantages:
        """See ``functions.reinforce_plus_plus``."""
        from posttune.advantage import functions

        return functions.reinforce_plus_plus(batch, **self.config.model_dump())


class ReinforcePlusPlusBaseline(Estimator):
    """REINFORCE++ with the group's mean as baseline (arXiv:2501.03262)."""

    class Config(GroupConfig):
        """Options of ``reinforce_plus_plus_baseline``."""

        whiten: bool = Field(True, description=_WHITEN)
        ddof: Ddof = Field(1, description=_DDOF)
        eps: NonNegativeFloat = Field(1e-8, description=_EPS_VAR)

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def advantage_estimator_traits(self) -> Traits:
        """Its statistics range over the batch where it whitens."""
        return Traits(needs_groups=True, scope="batch" if self.config.whiten else "group")

    @hookimpl
    def advantage_estimator_compute(self, batch: AdvantageBatch) -> Advantages:
        """See ``functions.reinforce_plus_plus_baseline``."""
        from posttune.advantage import functions

        return functions.reinforce_plus_plus_baseline(batch, **self.config.model_dump())


class ReMax(Estimator):
    """The score of the greedy answer as baseline (arXiv:2310.10505)."""

    class Config(Strict):
        """``remax`` has no options."""

    traits = Traits(needs_greedy_baseline=True, scope="sequence")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def advantage_estimator_compute(self, batch: AdvantageBatch) -> Advantages:
        """See ``functions.remax``."""
        from posttune.advantage import functions

        return functions.remax(batch)


class OPO(Estimator):
    """The length-weighted mean of the group as baseline (arXiv:2505.23585)."""

    class Config(GroupConfig):
        """Options of ``opo``."""

    traits = Traits(needs_groups=True, scope="group")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def advantage_estimator_compute(self, batch: AdvantageBatch) -> Advantages:
        """See ``functions.opo``."""
        from posttune.advantage import functions

        return functions.opo(batch, singleton=self.config.singleton)


class GPG(Estimator):
    """Group policy gradient: centred scores, scaled up for those that are 0 (arXiv:2504.02546)."""

    class Config(GroupConfig):
        """Options of ``gpg``."""

        f_norm: PositiveFloat = Field(1.0, description="Divides the advantages.")

    traits = Traits(needs_groups=True, scope="batch")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def advantage_estimator_compute(self, batch: AdvantageBatch) -> Advantages:
        """See ``functions.gpg``."""
        from posttune.advantage import functions

        return functions.gpg(batch, **self.config.model_dump())


class GRPOPassK(Estimator):
    """The lead of the best sample over the second goes to the best (arXiv:2503.19595)."""

    class Config(Strict):
        """Options of ``grpo_passk``. A group of one always gets 0: it has no second."""

        scale: bool = Field(True, description="Divide by the deviation of the group.")
        ddof: Ddof = Field(1, description=_DDOF)
        eps: NonNegativeFloat = Field(1e-6, description=_EPS_STD)

    traits = Traits(needs_groups=True, scope="group")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def advantage_estimator_compute(self, batch: AdvantageBatch) -> Advantages:
        """See ``functions.grpo_passk``."""
        from posttune.advantage import functions

        return functions.grpo_passk(batch, **self.config.model_dump())


class GDPO(Estimator):
    """Each dimension of the reward normalised in its group, then summed (arXiv:2601.05242)."""

    class Config(GroupConfig):
        """Options of ``gdpo``."""

        weights: dict[str, float] = Field(
            default_factory=dict, description="Weight by dimension of the reward; 1 where none is given."
        )
        ddof: Ddof = Field(1, description=_DDOF)
        eps: NonNegativeFloat = Field(1e-6, description=_EPS_STD)
        whiten: Literal["tokens", "sequences", "none"] = Field(
            "tokens", description="Normalise the sum over the tokens or the sequences of the batch."
        )
        whiten_eps: NonNegativeFloat = Field(
            1e-8, description="Added to the variance (tokens) or the deviation (sequences) of the sum."
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def advantage_estimator_traits(self) -> Traits:
        """Its statistics range over the batch where it whitens."""
        return Traits(needs_groups=True, scope="group" if self.config.whiten == "none" else "batch")

    @hookimpl
    def advantage_estimator_compute(self, batch: AdvantageBatch) -> Advantages:
        """See ``functions.gdpo``."""
        from posttune.advantage import functions

        return functions.gdpo(batch, **self.config.model_dump())
