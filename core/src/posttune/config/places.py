"""Where a configuration names plugins, and what the schema says of any path."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel

from posttune.config.document import Keys
from posttune.config.models import STAGES, PluginRef, RunConfig, Stage

PLUGIN_FIELDS: dict[tuple[str, str], str] = {
    ("RunConfig", "observers"): "observer",
    ("ConvertStage", "converter"): "data_converter",
    ("RlStage", "rollout"): "rollout_backend",
    ("RlStage", "rewards"): "reward",
    ("RlStage", "reward_manager"): "reward_manager",
    ("RlStage", "advantage"): "advantage_estimator",
    ("RlStage", "loss"): "policy_loss",
    ("EvaluateStage", "rewards"): "reward",
    ("EvaluateStage", "rollout"): "rollout_backend",
    ("ExportStage", "exporter"): "checkpoint_exporter",
    ("ValidationConfig", "rewards"): "reward",
}
"""The kind of plugin that a field (model, field) names: one, or a list of them."""


@dataclass(frozen=True)
class NamedPlugin:
    """A plugin that a configuration names, and where."""

    path: Keys
    kind: str
    ref: PluginRef
    model: type[BaseModel]


def named_plugins(data: Mapping[str, Any]) -> Iterator[NamedPlugin]:
    """The plugins that plain data names. What is not well formed is passed over: the schema reports it."""
    yield from _plugins_of(RunConfig, data, ())


def model_at(path: Keys, data: Any) -> type[BaseModel] | None:
    """The configuration model that describes the mapping at ``path``; None where there is none."""
    annotation: Any = RunConfig
    value = data
    for key in path:
        annotation = _child(annotation, key, value)
        value = _item(value, key)
    return _choose(annotation, value)


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """The models among the alternatives of an annotation."""
    return [
        part for part in alternatives(annotation) if isinstance(part, type) and issubclass(part, BaseModel)
    ]


def list_item(annotation: Any) -> Any:
    """The annotation of a list's items; None where no alternative is a list."""
    lists = [part for part in alternatives(annotation) if typing.get_origin(part) is list]
    return typing.get_args(lists[0])[0] if lists else None


def annotation_at(path: Keys, data: Any) -> Any:
    """The annotation of the value at ``path``; None where the schema has none."""
    annotation: Any = RunConfig
    value = data
    for key in path:
        annotation = _child(annotation, key, value)
        value = _item(value, key)
    return annotation


def _plugins_of(model: type[BaseModel], data: Any, path: Keys) -> Iterator[NamedPlugin]:
    if not isinstance(data, Mapping):
        return
    for name, info in model.model_fields.items():
        value = data.get(name)
        kind = PLUGIN_FIELDS.get((model.__name__, name))
        if kind:
            yield from _refs(kind, info.annotation, value, (*path, name))
            continue
        if name == "stages" and isinstance(value, Mapping):
            for stage, content in value.items():
                yield from _nested(info.annotation, content, (*path, name, stage), stage=True)
        else:
            yield from _nested(info.annotation, value, (*path, name))


def _nested(annotation: Any, value: Any, path: Keys, *, stage: bool = False) -> Iterator[NamedPlugin]:
    model = STAGES.get(str(_item(value, "kind"))) if stage else _choose(annotation, value)
    if model is not None:
        yield from _plugins_of(model, value, path)


def _refs(kind: str, annotation: Any, value: Any, path: Keys) -> Iterator[NamedPlugin]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _refs(kind, list_item(annotation), item, (*path, index))
    elif isinstance(value, Mapping):
        model = models_of(annotation)[0]
        options = value.get("options", {})
        name = value.get("name", model.model_fields["name"].get_default())
        if isinstance(name, str) and isinstance(options, dict):
            label = value.get("label")
            ref = PluginRef(name=name, label=label if isinstance(label, str) else None, options=options)
            yield NamedPlugin(path, kind, ref, model)


def _child(annotation: Any, key: str | int, value: Any) -> Any:
    if isinstance(key, int):
        return list_item(annotation)
    model = _choose(annotation, value)
    if model is not None:
        info = model.model_fields.get(key)
        return info.annotation if info else None
    mappings = [part for part in alternatives(annotation) if typing.get_origin(part) is dict]
    return typing.get_args(mappings[0])[1] if mappings else None


def _choose(annotation: Any, value: Any) -> type[BaseModel] | None:
    models = models_of(annotation)
    if len(models) > 1 and all(issubclass(model, Stage) for model in models):
        return STAGES.get(str(_item(value, "kind")))
    return models[0] if models else None


def _item(value: Any, key: str | int) -> Any:
    if isinstance(value, Mapping):
        return value.get(key)
    if isinstance(value, list) and isinstance(key, int) and 0 <= key < len(value):
        return value[key]
    return None


def alternatives(annotation: Any) -> list[Any]:
    """The parts of a union, without their metadata."""
    if typing.get_origin(annotation) is Annotated:
        return alternatives(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [part for each in typing.get_args(annotation) for part in alternatives(each)]
    return [annotation]
