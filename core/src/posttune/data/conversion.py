"""Source files to a dataset folder: streamed, and whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttune.catalog import Catalog
from posttune.config.models import PluginRef
from posttune.data.digests import Digests
from posttune.data.encoded import Truncation
from posttune.data.layout import CACHE, META, REJECTED, SCHEMA_VERSION, TRAIN, dump_meta, read_meta
from posttune.data.parallel import ordered_map, processors, submitted_map
from posttune.data.reading import expand
from posttune.data.rejected import OnBadRow, Rejected, read_rejected
from posttune.data.roles import canonical
from posttune.data.row_stream import BlockConverter, Outcome, Progress, Task, TaskStream, convert_rows
from posttune.data.streams import open_file
from posttune.data.templates import Template, resolve_template
from posttune.data.tokenize import Encoder, token_meta, tokenizer_fingerprint
from posttune.data.writer import BatchBuilder, DatasetWriter, Row
from posttune.errors import DataError, ModelError
from posttune.files import atomic_dir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORTH_FORKING = 1 << 24  # bytes of source; with a tokenizer a sixteenth of it
_FEW = 4  # blocks that are not plain


@dataclass(frozen=True)
class ConvertRequest:
    """What to convert, and how."""

    sources: Sequence[str | Path]
    to: str | Path
    converter: PluginRef | None = None  # inferred from the roles where none is given
    map: Mapping[str, str] = field(default_factory=dict)  # role to dotted path
    tokenizer: str | Path | None = None  # folder, or "bytes"; none: the text is kept
    template: str = "auto"
    on_bad_row: OnBadRow = "refuse"
    max_length: int | None = None  # tokens
    truncation: Truncation = "refuse"
    overwrite: bool = False
    progress: Progress | None = None
    jobs: int | None = None  # processes; by default one a processor, where there is enough to do


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did. ``rejected`` entries have file, row (from 1) and reason."""

    rows_in: int
    rows_out: int
    rejected: list[dict[str, Any]]
    warnings: list[dict[str, Any]]
    fingerprint: str
    path: Path
    unchanged: bool = False  # an equal dataset was there already

    def as_json(self) -> dict[str, Any]:
        """What ``posttune data convert --json`` prints."""
        keys = ("rows_in", "rows_out", "rejected", "warnings", "fingerprint")
        return {key: getattr(self, key) for key in keys}


def convert(request: ConvertRequest) -> ConversionReport:
    """Convert. An equal dataset at the destination is left alone; another needs ``overwrite``.

    Raises `DataError` for sources, rows, columns or a destination that cannot be used, and
    `ModelError` for the tokenizer. Nothing is left behind then.
    """
    return _Conversion(request).run()


def preview(request: ConvertRequest) -> Iterator[Row]:
    """The rows that a conversion would write, before they are tokenised. Raises what it would raise."""
    files = expand(request.sources)
    rejected = Rejected(request.on_bad_row)
    stream = TaskStream(files, request.converter, canonical(request.map))
    count = rows_in = 0
    for task in stream.tasks():
        outcome = Outcome()
        for row in convert_rows(task, stream.converter, outcome):
            count += 1
            yield row
        rows_in += outcome.rows_in
        rejected.extend(outcome.rejected)
    rejected.check(files, rows_in, count)


class _Conversion:
    """One conversion: the settings that were resolved, and what was seen."""

    def __init__(self, request: ConvertRequest) -> None:
        self.request = request
        self.map = canonical(request.map)
        self.files = expand(request.sources)
        self.to = Path(request.to).expanduser()
        self.tokenizer, self.template = _tokenizer(request)
        self.rejected = Rejected(request.on_bad_row)
        self.stream = TaskStream(self.files, request.converter, self.map)
        self.digests = Digests(self.files)
        self.rows_in = 0

    def run(self) -> ConversionReport:
        for path in self.files:  # the last one must not be found missing after hours
            open_file(path).close()
        _refuse_file_above(self.to)
        if not _is_free(self.to):
            found = _existing(self.to, self._fingerprint(), self.request.overwrite)
            if found is not None:
                return found
        place = Path(os.path.realpath(self.to)) if self.to.is_symlink() else self.to
        with atomic_dir(place, replace=self.request.overwrite) as folder:
            meta = self._meta(self._write(folder))
            self.rejected.write(folder)
            if self.tokenizer is not None:
                from posttune.models.tokenizer import save_tokenizer

                save_tokenizer(self.tokenizer, folder)
            names = sorted(path.name for path in folder.iterdir())
            (folder / META).write_text(dump_meta({**meta, "files": [META, *names]}), "utf-8")
        return _report(meta, self.rejected.entries(), self.to)

    def _write(self, folder: Path) -> dict[str, Any]:
        names = [str(path) for path in self.files]
        special = self.tokenizer.all_special_tokens if self.tokenizer is not None else ()
        encoder = self._encoder()
        with DatasetWriter(folder, names, tokens=encoder is not None, special=special) as writer:
            for outcome in self._outcomes(encoder, writer.builder):
                self.rows_in += outcome.rows_in
                self.rejected.extend(outcome.rejected)
                writer.warnings.update(outcome.warnings)
                if outcome.batch is not None:
                    writer.append(outcome.batch)
                if self.request.progress is not None:
                    self.request.progress(self.rows_in, self.stream.share)
        self.rejected.check(self.files, self.rows_in, writer.rows)
        return writer.summary()

    def _outcomes(self, encoder: Encoder | None, builder: BatchBuilder) -> Iterator[Outcome]:
        """What became of every block, in order."""
        tasks = self.stream.tasks()
        first = next(tasks, None)
        while first is not None and first.columns is None:
            yield BlockConverter(None, encoder, builder)(first)
            first = next(tasks, None)
        if first is None:
            return
        jobs, tasks = self._jobs(), chain([first], tasks)
        function = BlockConverter(self.stream.converter, encoder, builder)  # the converter is known now
        if jobs > 1 and function.has_columns:
            yield from self._in_threads(function, tasks, jobs)
        yield from ordered_map(function, tasks, jobs)

    def _in_threads(self, function: BlockConverter, tasks: Iterator[Task], jobs: int) -> Iterator[Outcome]:
        """What became of the blocks up to where too many were not plain: processes are better at those."""
        watch = _Plainness()
        with ThreadPoolExecutor(jobs + 1) as pool:
            self.digests.start(pool)
            try:
                for outcome in submitted_map(pool, function, watch.while_plain(tasks), jobs):
                    watch.note(outcome)
                    yield outcome
            except BaseException:
                self.digests.stop()
                raise

    def _jobs(self) -> int:
        if self.request.jobs is not None:
            return self.request.jobs
        size = sum(path.stat().st_size for path in self.files)
        worth = size > (WORTH_FORKING if self.tokenizer is None else WORTH_FORKING // 16)
        return processors() if worth else 1

    def _encoder(self) -> Encoder | None:
        if self.tokenizer is None:
            return None
        return Encoder(self.tokenizer, self.template, self.request.max_length, self.request.truncation)

    def _fingerprint(self) -> str:
        """Equal for equal content converted in an equal way; where the files lie does not matter."""
        request = self.request
        settings = {
            "schema": SCHEMA_VERSION,
            "sources": self.digests.values,
            "converter": request.converter.model_dump() if request.converter else None,
            "distribution": _distribution(request.converter),
            "map": self.map,
            "tokenizer": tokenizer_fingerprint(self.tokenizer) if self.tokenizer is not None else None,
            "template": [self.template.choice, self.template.source],
            "on_bad_row": request.on_bad_row,
            "limit": [request.max_length, request.truncation],
        }
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def _meta(self, summary: dict[str, Any]) -> dict[str, Any]:
        assert self.stream.converter is not None  # there was a row
        ref = self.request.converter
        hashes = zip(self.files, self.digests.values, strict=True)
        columns = self.stream.columns
        sources = [
            {
                "file": str(path),
                "bytes": path.stat().st_size,
                "sha256": sha,
                "map": columns.get(str(path), {}),
            }
            for path, sha in hashes
        ]
        return {
            "schema": SCHEMA_VERSION,
            "fingerprint": self._fingerprint(),
            "rows_in": self.rows_in,
            **summary,
            "rejected": self.rejected.count,
            "converter": {"name": self.stream.converter.name, "options": ref.options if ref else {}},
            "map": next(iter(columns.values())),
            **self._token_meta(),
            "max_length": self.request.max_length,
            "truncation": self.request.truncation,
            "sources": sources,
        }

    def _token_meta(self) -> dict[str, Any]:
        if self.tokenizer is None:
            return {"tokenizer": None, "template": self.template.as_meta()}
        return token_meta(self.tokenizer, self.template, self.request.tokenizer)


class DataConverter:
    """Convert from Python: ``DataConverter("a.jsonl", "out", "model").convert(prompt_key="question")``.

    ``input_path`` is a file, a folder, a pattern, or a list of them.
    """

    def __init__(
        self,
        input_path: str | Path | Sequence[str | Path],
        output_path: str | Path,
        tokenizer_name: str | Path | None = None,
    ) -> None:
        self.sources = [input_path] if isinstance(input_path, str | Path) else list(input_path)
        self.output_path = Path(output_path)
        self.tokenizer_name = tokenizer_name

    def convert(
        self,
        prompt_key: str | None = None,
        response_key: str | None = None,
        reject_key: str | None = None,
        max_length: int | None = None,
        *,
        messages_key: str | None = None,
        reference_key: str | None = None,
        converter: str | None = None,
        template: str = "auto",
        truncation: Truncation = "left",
        on_bad_row: OnBadRow = "refuse",
        overwrite: bool = False,
    ) -> ConversionReport:
        """Convert; see `convert`. With ``reject_key``, ``response_key`` is the better answer.

        A row longer than ``max_length`` tokens is cut on the left, so that its answer stays, and
        counted, unless ``truncation`` says otherwise.
        """
        answer = "chosen" if reject_key else "response"
        keys = {
            "prompt": prompt_key,
            answer: response_key,
            "rejected": reject_key,
            "messages": messages_key,
            "reference": reference_key,
        }
        request = ConvertRequest(
            sources=self.sources,
            to=self.output_path,
            converter=PluginRef(name=converter) if converter else None,
            map={role: key for role, key in keys.items() if key},
            tokenizer=self.tokenizer_name,
            template=template,
            on_bad_row=on_bad_row,
            max_length=max_length,
            truncation=truncation,
            overwrite=overwrite,
        )
        return convert(request)


class _Plainness:
    """Counts blocks that were not converted by columns."""

    def __init__(self) -> None:
        self._blocks = self._others = 0

    def note(self, outcome: Outcome) -> None:
        self._blocks += 1
        self._others += not outcome.quick

    def while_plain(self, tasks: Iterator[Task]) -> Iterator[Task]:
        """Tasks up to where more than a few, and more than a tenth, were of the other kind."""
        while self._others <= max(_FEW, self._blocks // 10) and (task := next(tasks, None)) is not None:
            yield task


def _is_free(to: Path) -> bool:
    """Whether nothing is there that a dataset would replace."""
    return not to.exists() or (to.is_dir() and not any(to.iterdir()))


def _refuse_file_above(to: Path) -> None:
    """Raise `DataError` where the folder cannot be made since a file is in the way."""
    above = next((parent for parent in to.absolute().parents if parent.exists()), None)
    if above is not None and not above.is_dir():
        raise DataError(
            "is a file, so that no folder can be in it", who=str(above), fix="choose another place"
        )


def _existing(to: Path, fingerprint: str, overwrite: bool) -> ConversionReport | None:
    """The report of an equal dataset that is there. Raises `DataError` where something else is."""
    if to.is_file():
        raise DataError("is a file, not a folder", who=str(to), fix="choose another place")
    try:
        meta = read_meta(to)
    except DataError as error:
        what = "holds something that is no dataset"
        raise DataError(what, who=str(to), fix="choose another place, or remove it") from error
    train = to / TRAIN
    if meta["fingerprint"] == fingerprint and train.is_file() and train.stat().st_size == meta["bytes"]:
        return _report(meta, read_rejected(to), to, unchanged=True)
    if overwrite:
        _refuse_foreign(to, meta)
        return None
    raise DataError(
        "holds another dataset (other sources or settings)",
        who=str(to),
        fix="choose another place, or replace it with --overwrite (overwrite: true in a configuration)",
    )


def _refuse_foreign(to: Path, meta: Mapping[str, Any]) -> None:
    """Raise `DataError` where a dataset's folder holds what is not of it, and would be lost."""
    from posttune.models.tokenizer import TOKENIZER_FILES

    own = {*meta.get("files", TOKENIZER_FILES), TRAIN, META, REJECTED, CACHE}
    foreign = sorted(path.name for path in to.iterdir() if path.name not in own)
    if foreign:
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        what = f"holds what is no part of the dataset: {', '.join(foreign[:3])}{more}"
        raise DataError(what, who=str(to), fix="move it away before the dataset is replaced")


def _tokenizer(request: ConvertRequest) -> tuple[PreTrainedTokenizerBase | None, Template]:
    if request.tokenizer is None:
        return None, Template(request.template, None)
    from posttune.models.tokenizer import has_tokenizer, load_tokenizer

    folder = Path(request.tokenizer)
    if folder.is_dir() and not has_tokenizer(folder):
        what = "the folder holds no tokenizer (no tokenizer.json)"
        fix = 'name a folder that holds one, or "bytes"'
        raise ModelError(what, who=f"tokenizer {folder}", fix=fix)
    tokenizer = load_tokenizer(request.tokenizer)
    return tokenizer, resolve_template(request.template, tokenizer)


def _distribution(converter: PluginRef | None) -> str:
    """Version of the converter, where it is not ours: its output may change with it."""
    if converter is None:
        return ""
    plugin = Catalog().check("data_converter", converter.name)
    return "" if plugin.distribution == "posttune" else f"{plugin.distribution} {plugin.version}"


def _report(
    meta: Mapping[str, Any], rejected: list[dict[str, Any]], path: Path, *, unchanged: bool = False
) -> ConversionReport:
    return ConversionReport(
        meta["rows_in"], meta["rows"], rejected, meta["warnings"], meta["fingerprint"], path, unchanged
    )
