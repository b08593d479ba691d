"""The built-in policy losses: options around the functions of ``loss.functions``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from posttune.config.models import NonNegativeFloat, PositiveFloat, Strict
from posttune.hookspecs import hookimpl
from posttune.types import LossTraits

if TYPE_CHECKING:
    from posttune.types import LossBatch, TokenLoss

AboveOne = Annotated[float, Field(gt=1)]
Level = Literal["token", "sequence"]

_LEVEL = "Whether the ratio is a token's, or the geometric mean over the sequence."


class ClipConfig(Strict):
    """How far the ratio may move. ``clip_ratio`` is the short form for both sides."""

    clip_ratio: NonNegativeFloat = Field(0.2, description="Range of the ratio around 1, on both sides.")
    clip_low: NonNegativeFloat | None = Field(None, description="Range below 1; defaults to clip_ratio.")
    clip_high: NonNegativeFloat | None = Field(
        None, description="Range above 1; defaults to clip_ratio. DAPO takes 0.28 beside 0.2."
    )

    @property
    def low(self) -> float:
        """The range below 1."""
        return self.clip_ratio if self.clip_low is None else self.clip_low

    @property
    def high(self) -> float:
        """The range above 1."""
        return self.clip_ratio if self.clip_high is None else self.clip_high


class Loss:
    """What the built-in losses share: their traits are fixed."""

    traits: ClassVar[LossTraits] = LossTraits()

    @hookimpl
    def policy_loss_traits(self) -> LossTraits:
        """What the loss is."""
        return self.traits


class PPOClip(Loss):
    """The clipped surrogate, with asymmetric clip and dual clip (arXiv:1707.06347, arXiv:1912.09729)."""

    class Config(ClipConfig):
        """Options of ``ppo_clip``."""

        dual_clip: AboveOne | None = Field(
            3.0,
            description="Where the advantage is negative, the ratio that bounds the loss; null: no bound.",
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def policy_loss_compute(self, batch: LossBatch) -> TokenLoss:
        """See ``functions.ppo_clip``."""
        from posttune.loss import functions

        return functions.ppo_clip(
            batch, low=self.config.low, high=self.config.high, dual=self.config.dual_clip
        )


class GSPO(Loss):
    """The clipped surrogate with the ratio of the sequence (arXiv:2507.18071)."""

    class Config(ClipConfig):
        """Options of ``gspo``. Ratios of sequences stay close to 1; the paper takes 3e-4 and 4e-4."""

        clip_ratio: NonNegativeFloat = Field(3e-4, description="Range of the ratio around 1, on both sides.")

    traits = LossTraits(ratio="sequence", aggregation="seq_mean_token_mean")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def policy_loss_compute(self, batch: LossBatch) -> TokenLoss:
        """See ``functions.ppo_clip``."""
        from posttune.loss import functions

        low, high = self.config.low, self.config.high
        return functions.ppo_clip(batch, low=low, high=high, dual=None, level="sequence", limit=10.0)


class CISPO(Loss):
    """Clipped importance-sampling weights on the policy gradient (arXiv:2506.13585)."""

    class Config(Strict):
        """Options of ``cispo``."""

        bounds: Literal["relative", "absolute"] = Field(
            "relative",
            description="relative: the weight stays within 1 - clip_low and 1 + clip_high (verl); absolute: "
            "clip_high is the largest weight and there is no least one (TRL, the paper).",
        )
        clip_low: NonNegativeFloat | None = Field(
            None, description="Range below 1, for relative bounds; null: no least weight."
        )
        clip_high: PositiveFloat | None = Field(
            None, description="Range above 1, or the largest weight; defaults to 0.28, or to 5 if absolute."
        )
        level: Level = Field("token", description=_LEVEL)

        @model_validator(mode="after")
        def _no_low_when_absolute(self) -> CISPO.Config:
            if self.bounds == "absolute" and self.clip_low is not None:
                raise ValueError("clip_low has no meaning with absolute bounds; remove it")
            return self

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def policy_loss_compute(self, batch: LossBatch) -> TokenLoss:
        """See ``functions.cispo``."""
        from posttune.loss import functions

        default = 5.0 if self.config.bounds == "absolute" else 0.28
        high = default if self.config.clip_high is None else self.config.clip_high
        return functions.cispo(
            batch, low=self.config.clip_low, high=high, bounds=self.config.bounds, level=self.config.level
        )


class SAPO(Loss):
    """A soft gate in the place of the clip (arXiv:2511.20347)."""

    class Config(Strict):
        """Options of ``sapo``."""

        tau_positive: PositiveFloat = Field(1.0, description="Temperature where the advantage is positive.")
        tau_negative: PositiveFloat = Field(1.05, description="Temperature elsewhere.")
        level: Level = Field("token", description=_LEVEL)

    traits = LossTraits(aggregation="seq_mean_token_mean")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def policy_loss_compute(self, batch: LossBatch) -> TokenLoss:
        """See ``functions.sapo``."""
        from posttune.loss import functions

        return functions.sapo(batch, **self.config.model_dump())


class GeoMean(Loss):
    """The geometric mean of clipped token ratios (arXiv:2507.20673)."""

    class Config(Strict):
        """Options of ``geo_mean``."""

        clip_low: NonNegativeFloat = Field(0.4, description="Range of the log-ratio below 0.")
        clip_high: NonNegativeFloat = Field(0.4, description="Range of the log-ratio above 0.")

    traits = LossTraits(ratio="sequence", aggregation="seq_mean_token_mean")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def policy_loss_compute(self, batch: LossBatch) -> TokenLoss:
        """See ``functions.geo_mean``."""
        from posttune.loss import functions

        return functions.geo_mean(batch, low=self.config.clip_low, high=self.config.clip_high)


class DPPOTV(Loss):
    """A trust region by the total variation of the token's probability (arXiv:2602.04879)."""

    class Config(Strict):
        """Options of ``dppo_tv``."""

        clip_low: NonNegativeFloat = Field(0.15, description="Largest fall of the token's probability.")
        clip_high: NonNegativeFloat = Field(0.15, description="Largest rise of the token's probability.")
        ratio_cap: PositiveFloat = Field(20.0, description="Largest weight of a token.")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def policy_loss_compute(self, batch: LossBatch) -> TokenLoss:
        """See ``functions.dppo_tv``."""
        from posttune.loss import functions

        low, high, cap = self.config.clip_low, self.config.clip_high, self.config.ratio_cap
        return functions.dppo_tv(batch, low=low, high=high, cap=cap)


class DPPOKL(Loss):
    """A trust region by the binary KL of the token's probability (arXiv:2602.04879)."""

    class Config(Strict):
        """Options of ``dppo_kl``."""

        clip_low: NonNegativeFloat = Field(0.05, description="Largest divergence when the probability falls.")
        clip_high: NonNegativeFloat = Field(0.05, description="Largest divergence when it rises.")
        ratio_cap: PositiveFloat = Field(20.0, description="Largest weight of a token.")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def policy_loss_compute(self, batch: LossBatch) -> TokenLoss:
        """See ``functions.dppo_kl``."""
        from posttune.loss import functions

        low, high, cap = self.config.clip_low, self.config.clip_high, self.config.ratio_cap
        return functions.dppo_kl(batch, low=low, high=high, cap=cap)


class GPGLoss(Loss):
    """The plain policy gradient, for on-policy steps (arXiv:2504.02546)."""

    class Config(Strict):
        """``gpg`` has no options."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def policy_loss_compute(self, batch: LossBatch) -> TokenLoss:
        """See ``functions.gpg``."""
        from posttune.loss import functions

        return functions.gpg(batch)


class LUSPO(Loss):
    """GSPO whose sequences count by their length, so that long ones are not favoured (arXiv:2602.05261)."""

    class Config(ClipConfig):
        """Options of ``luspo``."""

        clip_ratio: NonNegativeFloat = Field(2e-3, description="Range of the ratio around 1, on both sides.")
        level: Level = Field("sequence", description=_LEVEL)

    traits = LossTraits(ratio="sequence", aggregation="seq_mean_token_sum")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def policy_loss_traits(self) -> LossTraits:
        """The ratio is what the options say."""
        return LossTraits(ratio=self.config.level, aggregation="seq_mean_token_sum")

    @hookimpl
    def policy_loss_compute(self, batch: LossBatch) -> TokenLoss:
        """See ``functions.ppo_clip``."""
        from posttune.loss import functions

        low, high, level = self.config.low, self.config.high, self.config.level
        return functions.ppo_clip(batch, low=low, high=high, dual=None, level=level)


class VESPO(Loss):
    """A smooth weight of the sequence's ratio on the policy gradient (arXiv:2602.10693)."""

    class Config(Strict):
        """Options of ``vespo``: the weight is w^k exp(lambda (1 - w))."""

        k_positive: NonNegativeFloat = Field(2.0, description="k where the advantage is not negative.")
        lambda_positive: PositiveFloat = Field(3.0, description="lambda where it is not negative.")
        k_negative: NonNegativeFloat = Field(3.0, description="k where the advantage is negative.")
        lambda_negative: PositiveFloat = Field(2.0, description="lambda where it is negative.")

    traits = LossTraits(ratio="sequence")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def policy_loss_compute(self, batch: LossBatch) -> TokenLoss:
        """See ``functions.vespo``."""
        from posttune.loss import functions

        return functions.vespo(batch, **self.config.model_dump())
