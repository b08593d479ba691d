"""How the models of a run lie on its processes."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from posttune.config.base import Positive, PositiveFloat, Strict
from posttune.errors import UserError

Half = Literal["float32", "bfloat16", "float16"]


class Layout(Strict):
    """The processes as a box: copies x shards x slices of every matrix."""

    replicate: Positive = 1
    shard: Positive = 1
    tensor: Positive = 1

    @property
    def sharded(self) -> bool:
        """Whether weights, gradients and optimiser state are cut over processes."""
        return self.shard > 1

    @property
    def data(self) -> int:
        """Processes, or groups of them, that each have rows of their own."""
        return self.replicate * self.shard


class ParallelConfig(Strict):
    """Sharding over the processes of the run. What is left over holds copies."""

    data_shard: int = Field(
        default=1,
        ge=-1,
        description="Processes that a model, its gradients and its optimiser state are cut over (FSDP2); "
        "1: each has all of it; -1: all that there are.",
    )
    data_replicate: Positive | None = Field(
        default=None, description="Copies of that; what the number of processes leaves, where none is given."
    )
    tensor: Positive = Field(
        default=1,
        description="Processes that share every matrix and work on the same rows (tensor parallelism).",
    )
    reshard_after_forward: bool = Field(
        default=True, description="Give gathered weights back between forward and backward: less memory."
    )
    param_dtype: Half | None = Field(
        default=None, description="Type that sharded weights are gathered and computed in; the model's own."
    )
    reduce_dtype: Half | None = Field(
        default=None, description="Type that sharded gradients are summed in; that of the computation."
    )
    deadline_s: PositiveFloat = Field(
        default=1800.0,
        description="Longest wait of a process for the others, seconds; then the run ends with the stacks "
        "of all.",
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.data_shard == 0:
            raise ValueError("data_shard is a number of processes, or -1 for all")
        return self

    def layout(self, world: int) -> Layout:
        """The box for ``world`` processes. Raises UserError where it has none of that size."""
        data, rest = divmod(world, self.tensor)
        if rest:
            raise _refused(f"tensor: {self.tensor} does not divide {world} processes")
        shard = self.data_shard if self.data_shard > 0 else max(1, data // (self.data_replicate or 1))
        replicate = self.data_replicate or max(1, data // shard)
        if replicate * shard != data:
            raise _refused(
                f"data_replicate {replicate} x data_shard {shard} x tensor {self.tensor} are "
                f"{replicate * shard * self.tensor} processes, and the run has {world}"
            )
        return Layout(replicate=replicate, shard=shard, tensor=self.tensor)


def _refused(what: str) -> UserError:
    fix = "change it, or --nproc; data_shard: -1 takes what there is"
    return UserError(what, who="parallel", fix=fix)
