"""Scores by content, within a bound."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from dataclasses import replace

from posttune.types import Needs, Sample, Score


class ScoreCache:
    """The scores of the samples seen last, one reward's with one set of options."""

    def __init__(self, entries: int, needs: Needs) -> None:
        self._entries = entries
        self._needs = needs
        self._scores: OrderedDict[bytes, Score] = OrderedDict()

    def __len__(self) -> int:
        return len(self._scores)

    def __contains__(self, key: bytes) -> bool:
        return key in self._scores

    def key(self, sample: Sample) -> bytes | None:
        """A hash of all that the score can depend on; None where a column has no exact text."""
        if not self._entries:
            return None
        seen = visible(sample, self._needs)
        content: list[object] = [seen.prompt, seen.response, seen.reference, dict(seen.columns)]
        if seen.completion is not None:
            content += [seen.completion.token_ids, seen.completion.finish_reason]
        try:
            text = json.dumps(content, sort_keys=True)
        except (TypeError, ValueError):
            return None
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def get(self, key: bytes) -> Score:
        """The score of a key that is there."""
        self._scores.move_to_end(key)
        return self._scores[key]

    def put(self, key: bytes, score: Score) -> None:
        """Keep a score; the one that was used longest ago goes where there is no room."""
        self._scores[key] = score
        self._scores.move_to_end(key)
        if len(self._scores) > self._entries:
            self._scores.popitem(last=False)


def visible(sample: Sample, needs: Needs) -> Sample:
    """A sample as a reward sees it that names what it reads: without its other columns and its tokens."""
    if needs.reads is None:
        return sample
    columns = {name: sample.columns[name] for name in needs.reads if name in sample.columns}
    return replace(sample, columns=columns, completion=None)
