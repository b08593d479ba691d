"""The table of a step's samples that observers are shown."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

import pyarrow as pa
from torch import Tensor

from posttune.distributed.ranks import Ranks
from posttune.trainer._batch import RolloutBatch
from posttune.trainer._judge import Judged, score_columns
from posttune.trainer.loop import Position
from posttune.types import Completion, Sample

IDS = pa.list_(pa.int32())
FLOATS = pa.list_(pa.float32())


def samples_table(
    samples: Sequence[Sample], batch: RolloutBatch, judged: Judged, position: Position, ranks: Ranks
) -> pa.Table | None:
    """The samples of all ranks in the order of their prompts, on rank 0; None elsewhere.

    Every rank calls it. ``position`` is that of the end of the step; the global step goes along in
    the schema's metadata.
    """
    local = _local_table(samples, batch, judged, position.step)
    if ranks.world == 1:
        table = local
    else:
        parts = [_read(data) for data in ranks.gather_objects([_written(local)])]
        table = pa.concat_tables(parts, promote_options="permissive") if parts else None
    if table is None:
        return None
    return table.replace_schema_metadata({"global_step": str(position.global_step)})


def _local_table(samples: Sequence[Sample], batch: RolloutBatch, judged: Judged, step: int) -> pa.Table:
    completions = [sample.completion for sample in samples if sample.completion is not None]
    prompts = [sequence.ids[: sequence.response_start] for sequence in batch.sequences]
    columns = {
        "step": pa.array([step] * len(samples), pa.int64()),
        "prompt_id": pa.array([str(sample.group) for sample in samples], pa.string()),
        "prompt": pa.array([sample.prompt for sample in samples], pa.string()),
        "completion": pa.array([sample.response for sample in samples], pa.string()),
        "prompt_ids": pa.array(prompts, IDS),
        "completion_ids": pa.array([completion.token_ids for completion in completions], IDS),
        "logprobs": pa.array([completion.logprobs for completion in completions], FLOATS),
        "finish_reason": pa.array([completion.finish_reason for completion in completions], pa.string()),
        "weight_version": pa.array([completion.weight_version for completion in completions], pa.int64()),
        "reward": pa.array([reward.value for reward in judged.rewards], pa.float64()),
        **{name: pa.array(values, pa.float64()) for name, values in _score_columns(judged).items()},
        "advantage": _per_token(batch.advantages, completions),
        "reference": _references(samples),
    }
    return pa.table(columns)


def _score_columns(judged: Judged) -> dict[str, list[float | None]]:
    columns: dict[str, list[float | None]] = {}
    for label, scores in judged.scores.items():
        columns |= score_columns(label, scores)
    return columns


def _per_token(values: Tensor, completions: Sequence[Completion]) -> pa.Array:
    offsets = [0]
    for completion in completions:
        offsets.append(offsets[-1] + len(completion.token_ids))
    flat = pa.array(values.cpu().numpy(), pa.float32())
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat).cast(FLOATS)


def _references(samples: Sequence[Sample]) -> pa.Array:
    """Strings where every reference is one, else lists of strings."""
    found = [sample.reference for sample in samples]
    if not any(isinstance(reference, list) for reference in found):
        return pa.array(found, pa.string())
    lists = [[reference] if isinstance(reference, str) else reference for reference in found]
    return pa.array(lists, pa.list_(pa.string()))


def _written(table: pa.Table) -> bytes:
    buffer = BytesIO()
    with pa.ipc.new_stream(buffer, table.schema) as writer:
        writer.write_table(table)
    return buffer.getvalue()


def _read(data: bytes) -> pa.Table:
    with pa.ipc.open_stream(data) as reader:
        return reader.read_all()
