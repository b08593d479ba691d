"""The model and the data that a stage starts from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from posttune.config.models import CriticConfig, DataConfig, ModelConfig, RewardModelStage, RlStage, SftStage
from posttune.data.dataset import SampleDataset
from posttune.data.sampler import PositionSampler
from posttune.errors import DataError, UserError
from posttune.models.load import LoadedModel, load_model
from posttune.models.load_scalar import load_critic
from posttune.run.stages import StageContext


def load_stage_model(stage: SftStage | RlStage, context: StageContext) -> LoadedModel:
    """The model that the stage starts from, on this rank's device."""
    config = ModelConfig(path=stage.model) if isinstance(stage.model, str) else stage.model
    path = None if config.path is None else context.resolve(config.path)
    return load_model(config, path, seed=context.run.seed, device=context.ranks.device)


def load_stage_critic(stage: RlStage, critic: CriticConfig, context: StageContext) -> LoadedModel:
    """The stage's critic, from the model that it names or else from the stage's own."""
    model = stage.model if critic.model is None else critic.model
    config = ModelConfig(path=model) if isinstance(model, str) else model
    path = None if config.path is None else context.resolve(config.path)
    return load_critic(config, path, seed=context.run.seed, device=context.ranks.device)


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
