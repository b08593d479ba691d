"""The samples of a step as tensors, and their way through the model in micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from posttune import _segments as segments
from posttune.config.models import PackingConfig
from posttune.data.packing import MicroPlan, ModelBatch, TokenSequence, collate, pack, plan, token_index
from posttune.data.partition import balance
from posttune.distributed import watch
from posttune.distributed.ranks import Ranks
from posttune.memory.residence import resident
from posttune.models.forward import response_logprobs
from posttune.trainer.metrics import Meter
from posttune.types import Packed, Request, Sample


@dataclass
class RolloutBatch:
    """This rank's samples of a step: N response tokens of S sequences, in the order of the samples.

    A token has a log-probability where its sequence was passed through the model, else 0.
    """

    sequences: list[TokenSequence]
    packed: Packed
    rollout_logp: Tensor | None  # float32 [N], of the engine
    scored: Tensor  # bool [S]; False: the sample is masked everywhere
    advantages: Tensor  # float32 [N]
    old_logp: Tensor  # float32 [N], of the policy that answered
    entropy: Tensor | None = None  # float32 [N], nats, of the policy that answered; None before its pass
    ref_logp: Tensor | None = None  # float32 [N], of the reference
    values: Tensor | None = None  # float32 [N], of the critic before the update
    returns: Tensor | None = None  # float32 [N], what the critic learns
    fresh: set[int] = field(default_factory=set)  # sequences whose old_logp the first update will tell

    def trainable(self) -> list[int]:
        """Sequences that count in every mean: scored, and with a token of the policy's."""
        return torch.nonzero(self.scored & (segments.token_counts(self.packed) > 0)).flatten().tolist()

    def only(self, rows: Sequence[int]) -> Packed:
        """The packed layout with the tokens of ``rows`` alone counting."""
        chosen = torch.zeros(len(self.sequences), dtype=torch.bool, device=self.scored.device)
        chosen[list(rows)] = True
        return replace(self.packed, mask=self.packed.mask & segments.spread(chosen, self.packed))

    def with_signal(self, rows: Sequence[int]) -> list[int]:
        """Those of ``rows`` that have an advantage other than 0 somewhere."""
        index = segments.sequence_index(self.packed.cu_seqlens)
        counts = segments.segment_sum((self.advantages != 0).long(), index, len(self.sequences)).tolist()
        return [row for row in rows if counts[row]]


def make_batch(samples: Sequence[Sample], requests: Sequence[Request], device: torch.device) -> RolloutBatch:
    """The batch of these samples, which answer these requests. Advantages are 0 yet."""
    prompts = {request.id: request.prompt_ids for request in requests}
    completions = [sample.completion for sample in samples if sample.completion is not None]
    sequences = [
        TokenSequence(
            [*prompts[completion.request_id], *completion.token_ids],
            len(prompts[completion.request_id]),
            group=completion.request_id,
        )
        for completion in completions
    ]
    packed = pack(sequences, device)
    known = [completion.logprobs for completion in completions if completion.logprobs is not None]
    flat = [value for logprobs in known for value in logprobs]
    return RolloutBatch(
        sequences=sequences,
        packed=packed,
        rollout_logp=torch.tensor(flat, device=device) if len(known) == len(sequences) else None,
        scored=torch.ones(len(sequences), dtype=torch.bool, device=device),
        advantages=torch.zeros(len(packed.mask), device=device),
        old_logp=torch.zeros(len(packed.mask), device=device),
    )


@dataclass(frozen=True)
class Micro:
    """One forward pass over some of a batch's sequences."""

    inputs: ModelBatch
    index: Tensor  # int64 [n]; where its response tokens lie in the batch

    def of(self, values: Tensor | None) -> Tensor | None:
        """What belongs to this micro-batch of a tensor [N]."""
        return None if values is None else values[self.index]


def even_share(ranks: Ranks, rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """This process's part of ``rows``, of about as many tokens as the others'; ``lengths`` are theirs.

    The parts of all shares together are ``rows``, each once, so that no mean over the step changes.
    """
    if ranks.data_world == 1:
        return list(rows)
    return [rows[place] for place in balance(lengths, ranks.data_world)[ranks.data_rank]]


def model_batches(
    sequences: Sequence[TokenSequence],
    packing: PackingConfig,
    ranks: Ranks,
    meter: Meter | None = None,
) -> Iterator[ModelBatch]:
    """The sequences, packed; each once. With a meter, what the packing wastes is noted."""
    lengths = [len(sequence.ids) for sequence in sequences]
    plans = plan(lengths, micro_batch_tokens=packing.micro_batch_tokens, row_tokens=packing.row_tokens)
    if meter is not None:
        note_packing(meter, plans, lengths)
    return in_step([(sequences, micro) for micro in plans], ranks)


def in_step(parts: Sequence[tuple[Sequence[TokenSequence], MicroPlan]], ranks: Ranks) -> Iterator[ModelBatch]:
    """The batches of these parts; where a model is cut, as many on every process: the last may be empty.

    A forward or backward pass of such a model takes all processes.
    """
    missing = max(ranks.all_objects(len(parts))) - len(parts) if ranks.layout.sharded else 0
    for number in range(len(parts) + missing):
        with watch.waiting(f"the others' pass {number + 1}") if ranks.layout.sharded else nullcontext():
            yield collate(*parts[number], ranks.device) if number < len(parts) else nothing(ranks.device)


def nothing(device: torch.device) -> ModelBatch:
    """A row of two tokens, neither of which is predicted; of no sequence."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    return ModelBatch(ids, torch.tensor([[0, 1]], device=device), none, none, pack([], device), ())


def micro_batches(
    batch: RolloutBatch,
    rows: Sequence[int],
    packing: PackingConfig,
    ranks: Ranks,
    meter: Meter | None = None,
) -> Iterator[Micro]:
    """The sequences ``rows`` of a batch, packed."""
    chosen = [batch.sequences[row] for row in rows]
    for inputs in model_batches(chosen, packing, ranks, meter):
        order = [rows[number] for number in inputs.order]
        yield Micro(inputs, token_index(batch.packed.cu_seqlens, order))


def note_packing(meter: Meter, plans: Sequence[MicroPlan], lengths: Sequence[int]) -> None:
    """Tokens, padding, fill and the attention computed for nothing, as sums that add up over batches."""
    rows = sum(len(micro.rows) for micro in plans)
    computed, real = sum(micro.tokens for micro in plans), sum(lengths)
    meter.sum("update/tokens", real)
    meter.mean("update/padding_fraction", computed - real, computed)
    meter.mean("update/tokens_per_row", real, rows)
    squares = sum(len(micro.rows) * micro.row_length**2 for micro in plans)
    meter.mean("update/attention_waste", squares, sum(length * length for length in lengths))


@torch.no_grad()
def token_logprobs(
    model: torch.nn.Module,
    batch: RolloutBatch,
    rows: Sequence[int],
    packing: PackingConfig,
    temperature: float,
    ranks: Ranks,
    *,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability (and entropy, nats) of each response token of ``rows``; float32 [N], 0 elsewhere."""
    logp = torch.zeros_like(batch.advantages)
    spread = torch.zeros_like(batch.advantages) if entropy else None
    with resident(model):
        for micro in micro_batches(batch, rows, packing, ranks):
            out = response_logprobs(model, micro.inputs, temperature=temperature, entropy=entropy)
            logp[micro.index] = out.logp
            if spread is not None and out.entropy is not None:
                spread[micro.index] = out.entropy
    return logp, spread
