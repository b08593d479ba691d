"""A model as a script describes it. Nothing is loaded before a trainer, or ``load``, asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from posttune.config.models import LoraConfig, ModelConfig, Strict
from posttune.config.problems import describe_error, suggest_key
from posttune.errors import ConfigError, Problem

if TYPE_CHECKING:
    from posttune.models.load import LoadedModel

Lora = LoraConfig | Mapping[str, Any] | bool | None
Model = TypeVar("Model", bound=Strict)


class HFModel:
    """A Hugging Face folder (or a checkpoint, or a run folder), and how it is to be trained.

    ``is_critic``: it gives a value for every token instead of probabilities; from a language model the
    head is new and its first values are 0. ``use_flash_attn``: ``model.attention: flash``; a device that
    cannot run it gets sdpa, and one line says so.
    ``lora``: True, or the fields of ``LoraConfig`` (rank, alpha, dropout, target_modules): adapters
    alone are trained. ``dtype``: float32, bfloat16 or float16, of the weights while training.
    Raises ConfigError for a value that is not possible.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        is_critic: bool = False,
        use_flash_attn: bool = False,
        enable_gradient_checkpointing: bool = False,
        lora: Lora = None,
        dtype: Any = "float32",
        tokenizer: str | Path | None = None,
    ) -> None:
        self.path = Path(path)
        self.is_critic = is_critic
        self.use_flash_attn = use_flash_attn
        self.config: ModelConfig = _validated(
            ModelConfig,
            {
                "path": str(path),
                "tokenizer": None if tokenizer is None else str(tokenizer),
                "dtype": str(dtype).removeprefix("torch."),
                "attention": "flash" if use_flash_attn else "auto",
                "gradient_checkpointing": enable_gradient_checkpointing,
                "lora": _lora(lora),
            },
        )

    def __repr__(self) -> str:
        return f"HFModel({str(self.path)!r}, is_critic={self.is_critic})"

    def load(self, *, seed: int = 0, device: str = "cpu") -> LoadedModel:
        """The model with its tokenizer, in eval mode. Raises ModelError and CheckpointError."""
        from posttune.models.load import load_model
        from posttune.models.load_scalar import load_critic

        load = load_critic if self.is_critic else load_model
        return load(self.config, self.path.expanduser(), seed=seed, device=device)


def _lora(given: Lora) -> LoraConfig | None:
    if given is None or given is False:
        return None
    if isinstance(given, LoraConfig):
        return given
    return _validated(LoraConfig, {} if given is True else dict(given))


def _validated(model: type[Model], fields: dict[str, Any]) -> Model:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        details = error.errors(include_url=False)
    problems = []
    for detail in details:
        path = ".".join(["HFModel", *map(str, detail["loc"])])
        unknown = detail["type"] == "extra_forbidden"
        suggestion = suggest_key(str(detail["loc"][-1]), model) if unknown else ""
        problems.append(Problem(path, describe_error(detail), suggestion=suggestion))
    raise ConfigError(problems, fix="see the docstring of posttune.HFModel")
