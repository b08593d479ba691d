from posttune import hookimpl
from posttune.types import Advantages, Traits


class Plain:
    """The score itself, for every token."""

    @hookimpl
    def advantage_estimator_traits(self):
        return Traits(scope="sequence")

    @hookimpl
    def advantage_estimator_compute(self, batch):
        tokens = batch.scores.nan_to_num().repeat_interleave(batch.packed.cu_seqlens.diff())
        return Advantages(tokens.where(batch.packed.mask, 0).float())
