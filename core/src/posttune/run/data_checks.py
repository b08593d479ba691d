"""Data against what stages and rewards need of it: on every row, with the numbers of the first bad ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from posttune.config.document import Document, Keys
from posttune.config.load import LoadedConfig
from posttune.config.models import ConvertStage, DataConfig
from posttune.errors import PosttuneError
from posttune.nearest import nearest
from posttune.run.data_view import REFERENCE, DataView, view_dataset, view_sources
from posttune.run.folder import RunFolder
from posttune.run.resume import Step
from posttune.types import Needs

if TYPE_CHECKING:
    from posttune.run.dry_run import RunCheck


@dataclass(frozen=True)
class Demand:
    """What a stage asks of its data: one of some roles (none: any), and what others need, by who it is."""

    path: Keys
    data: str | DataConfig
    roles: tuple[str, ...]
    needs: Mapping[str, Needs] = field(default_factory=dict)  # by "reward 'gsm8k'"

    @property
    def source(self) -> str:
        """A folder, or the name of a convert stage."""
        return self.data if isinstance(self.data, str) else self.data.path

    @property
    def limit(self) -> int | None:
        """The first rows alone count; None: all."""
        return None if isinstance(self.data, str) else self.data.limit

    @property
    def columns(self) -> dict[str, list[str]]:
        """Who needs each column."""
        wanted: dict[str, list[str]] = defaultdict(list)
        for who, needs in self.needs.items():
            for name in (*needs.columns, *([REFERENCE] if needs.reference else [])):
                wanted[name].append(who)
        return wanted


def check_data(
    loaded: LoadedConfig,
    folder: RunFolder,
    plan: Sequence[Step],
    demands: Sequence[Demand],
    found: RunCheck,
) -> None:
    """Look at every convert stage that is left to run, and at the data of every demand."""
    views = _Views(loaded, folder, plan, demands, found)
    for name, stage in loaded.config.stages.items():
        if isinstance(stage, ConvertStage) and name in views.pending:
            views.of_stage(name, stage)
    for demand in demands:
        view = views.of(demand)
        if view is not None:
            for message, suggestion in _unmet(demand, view):
                found.problems.append(loaded.document.problem(demand.path, message, suggestion))


class _Views:
    """Each dataset is read once, whatever many stages use it."""

    def __init__(
        self,
        loaded: LoadedConfig,
        folder: RunFolder,
        plan: Sequence[Step],
        demands: Sequence[Demand],
        found: RunCheck,
    ) -> None:
        self.document: Document = loaded.document
        self.stages = loaded.config.stages
        self.folder, self.demands, self.found = folder, demands, found
        self.pending = {step.name for step in plan if step.action != "skip"}
        self.done = {step.name: step.marker.output for step in plan if step.marker and step.action == "skip"}
        self._cache: dict[tuple[str, int | None], DataView | None] = {}

    def of(self, demand: Demand) -> DataView | None:
        """The data of a demand; None where it cannot be read, which was reported."""
        stage = self.stages.get(demand.source)
        if isinstance(stage, ConvertStage) and demand.source in self.pending:
            return self.of_stage(demand.source, stage)
        key = (demand.source, demand.limit)
        if key not in self._cache:
            self._cache[key] = self._on_disk(demand)
        return self._cache[key]

    def of_stage(self, name: str, stage: ConvertStage) -> DataView | None:
        """What a convert stage would make."""
        key = (name, None)
        if key not in self._cache:
            self._cache[key] = self._converted(name, stage)
        return self._cache[key]

    def _converted(self, name: str, stage: ConvertStage) -> DataView | None:
        path: Keys = ("stages", name)
        wanted = self._wanted(name)
        try:
            to = Path(stage.to).expanduser() if stage.to is not None else self.folder.data(name)
            tokenizer = None if stage.tokenizer in self.stages else stage.tokenizer
            view = view_sources(stage.model_copy(update={"tokenizer": tokenizer}), to, wanted)
        except PosttuneError as error:
            self._report((*path, "source"), error)
            return None
        self.found.facts[name] |= {"rows": view.rows, "columns": view.columns}
        return view

    def _on_disk(self, demand: Demand) -> DataView | None:
        stored = self.done.get(demand.source)
        place = self.folder.restored(stored) if stored else Path(demand.source).expanduser()
        try:
            return view_dataset(place, self._wanted(demand.source), demand.limit)
        except PosttuneError as error:
            self._report(demand.path, error, nearest(demand.source, self.stages))
            return None

    def _wanted(self, source: str) -> set[str]:
        """The columns that any stage asks of a dataset: it is read once for all of them."""
        return {column for demand in self.demands if demand.source == source for column in demand.columns}

    def _report(self, path: Keys, error: PosttuneError, suggestion: str = "") -> None:
        text = f"{error.who}: {error.what}" if error.who else error.what
        message = f"{text} (next: {error.fix})" if error.fix else text
        self.found.problems.append(self.document.problem(path, message, suggestion))


def _unmet(demand: Demand, view: DataView) -> Iterator[tuple[str, str]]:
    """Messages, each with a suggestion."""
    columns = ", ".join(view.columns) or "none"
    if view.rows and demand.roles and not set(demand.roles) & set(view.columns):
        yield f"needs one of {', '.join(demand.roles)}; the columns of {demand.source} are {columns}", ""
    for name, needing in demand.columns.items():
        who = f"{' and '.join(needing)} {'needs' if len(needing) == 1 else 'need'}"
        if name not in view.columns:
            message = f"{who} the column {name!r}; the columns of {demand.source} are {columns}"
            yield message, nearest(name, view.columns)
        elif view.lacking[name]:
            count = view.lacking[name]
            rows = "1 row lacks" if count == 1 else f"{count} rows lack"
            yield f"{who} {name!r}, which {rows}: {view.where(name)}", ""
