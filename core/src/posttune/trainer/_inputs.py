"""The model and the data that a stage starts from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from transformers import PreTrainedModel

from posttune.config.memory import Tenant
from posttune.config.models import CriticConfig, DataConfig, ModelConfig, RewardModelStage, RlStage, SftStage
from posttune.data.dataset import SampleDataset
from posttune.data.sampler import PositionSampler
from posttune.distributed.sharding import cuts, place
from posttune.errors import DataError, UserError
from posttune.memory.apply import apply_memory, settle_in
from posttune.models.load import LoadedModel, Reference, load_model, load_reference
from posttune.models.load_scalar import load_critic
from posttune.run.stages import StageContext


def load_stage_model(stage: SftStage, context: StageContext) -> LoadedModel:
    """The model that the stage starts from, on this rank's device, cut as the run says."""
    loaded = _unplaced(stage.model, context)
    apply_memory(loaded.model, stage.memory, cut=cuts(context.ranks))
    place(loaded.model, context.ranks)
    return loaded


def load_policy(stage: RlStage, context: StageContext) -> tuple[LoadedModel, Reference | None]:
    """The same, and its reference where the stage measures the distance to one: of the first weights."""
    loaded = _unplaced(stage.model, context, waits="policy" in stage.memory.offload)
    reference = load_reference(loaded) if stage.kl.where != "none" else None
    _settle("policy", loaded.model, stage, context)
    if reference is not None and not loaded.lora:
        _settle("reference", reference.model, stage, context)
    return loaded, reference


def _settle(name: Tenant, model: PreTrainedModel, stage: RlStage, context: StageContext) -> None:
    """Cut the model over the processes as the run says, and keep it where the stage says.

    One that is to wait is not moved to the device first: beside an engine it may have no room there.
    """
    apply_memory(model, stage.memory, cut=cuts(context.ranks))
    if cuts(context.ranks) or name not in stage.memory.offload:
        place(model, context.ranks)
    settle_in(name, model, stage.memory, context.ranks.device)


def _unplaced(model: str | ModelConfig, context: StageContext, *, waits: bool = False) -> LoadedModel:
    """A model that is to be cut, or to wait, stays on the CPU: it may be too large for one device."""
    config = ModelConfig(path=model) if isinstance(model, str) else model
    path = None if config.path is None else context.resolve(config.path)
    ranks = context.ranks
    move = not (waits or cuts(ranks))
    return load_model(config, path, seed=context.run.seed, device=ranks.device, move=move)


def load_stage_critic(stage: RlStage, critic: CriticConfig, context: StageContext) -> LoadedModel:
    """The stage's critic, from the model that it names or else from the stage's own."""
    model = stage.model if critic.model is None else critic.model
    config = ModelConfig(path=model) if isinstance(model, str) else model
    path = None if config.path is None else context.resolve(config.path)
    ranks = context.ranks
    move = not ("critic" in stage.memory.offload or cuts(ranks))
    loaded = load_critic(config, path, seed=context.run.seed, device=ranks.device, move=move)
    _settle("critic", loaded.model, stage, context)
    return loaded


@dataclass(frozen=True)
class Data:
    """The rows that a stage draws from."""

    dataset: SampleDataset
    sampler: PositionSampler

    def steps(self, stage: SftStage | RewardModelStage | RlStage, rows_per_step: int) -> int:
        """The stage's number of steps: as it says, or as many as its epochs take."""
        if stage.steps is not None:
            return stage.steps
        return math.ceil(self.sampler.size * (stage.epochs or 0) / rows_per_step)


def load_data(
    data: str | DataConfig, loaded: LoadedModel, context: StageContext, name: str | None = None
) -> Data:
    """The dataset in the ids of the model's tokenizer; a copy that this needs goes by ``name``.

    Raises DataError and UserError.
    """
    config = DataConfig(path=data) if isinstance(data, str) else data
    dataset = SampleDataset(context.resolve(config.path))
    with context.ranks.main_first("tokenise"):
        dataset = dataset.tokenized(
            loaded.tokenizer,
            max_length=config.max_length,
            truncation=config.truncation,
            cache_dir=context.folder.data(f"{name or context.name}-tokenized"),
        )
    size = min(len(dataset), config.limit or len(dataset))
    if size == 0:
        raise UserError("the dataset has no rows", who=config.path, fix="convert data that has some")
    return Data(dataset, PositionSampler(size, context.run.seed, config.shuffle))


def longest_prompt(data: Data, limit: int | None = None) -> int:
    """Tokens of the longest prompt. Raises DataError for one that is empty or beyond ``limit``."""
    lengths = data.dataset.prompt_lengths[: data.sampler.size]
    longest, shortest = int(lengths.max()), int(lengths.min())
    if shortest == 0:
        fix = "leave such rows out of the data"
        raise DataError(f"the prompt of {_place(data, int(lengths.argmin()))} has no tokens", fix=fix)
    if limit is not None and longest > limit:
        raise DataError(
            f"{int((lengths > limit).sum())} of {len(lengths)} prompts are longer than {limit} tokens; "
            f"the longest, of {longest}, is {_place(data, int(lengths.argmax()))}",
            who="max_prompt_length",
            fix="raise it, or leave those rows out of the data",
        )
    return longest


def _place(data: Data, index: int) -> str:
    place = data.dataset.location(index)
    return f"row {place.row} of {place.file}"


def check_model_length(loaded: LoadedModel, longest: int, field: str) -> None:
    """Raise DataError where prompt and completion together exceed what the model can attend to."""
    limit = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise DataError(
            f"the longest prompt and max_new_tokens make {longest} tokens; the model has {limit} positions",
            who=field,
            fix="lower it, or leave out the longest prompts",
        )
