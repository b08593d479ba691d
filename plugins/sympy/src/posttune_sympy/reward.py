"""The reward `sympy_math`: 1 where the final answer equals the reference as mathematics, else 0."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any

from posttune import BaseRewardFunction, hookimpl
from posttune.errors import DataError
from posttune.types import Needs

from posttune_sympy import extraction, workers
from posttune_sympy.comparison import Comparison
from posttune_sympy.nodes import Node, Undefined, to_json, walk
from posttune_sympy.options import MathOptions
from posttune_sympy.reading import choice_letter, readable, readings, same_text, without_unit

MAX_NODES = 2_000  # of what SymPy is asked about
CACHED_VERDICTS = 4_096  # of SymPy's, the last ones
MAX_CACHED_NODES = 200
_log = logging.getLogger(__name__)


class MathRewardFunction(BaseRewardFunction):
    """1.0 where the response's final answer equals the reference's, else 0.0.

    Both sides are extracted by one table (``posttune_sympy.extraction``). Nothing of a text is executed;
    what SymPy may take long over runs in a process that is killed at ``time_limit``. Safe to call from
    any thread. Of a list of references any one will do.
    """

    Config = MathOptions

    def __init__(self, config: MathOptions | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self.counts: Counter[str] = Counter()  # of answers over time, and of workers that died

    @hookimpl
    def reward_needs(self) -> Needs:
        """A reference."""
        return Needs(reference=True)

    def compute_reward(
        self,
        prompt: str,  # noqa: ARG002
        response: str,
        reference: Any = None,
        **_columns: Any,
    ) -> float:
        """Raises DataError without a reference. An empty reference equals nothing."""
        references = reference if isinstance(reference, list | tuple) else [reference]
        if not references or any(each is None for each in references):
            raise DataError(
                "a sample has no reference",
                who="reward 'sympy_math'",
                fix="map the role reference (or response)",
            )
        judge = _Judge(self.config, self.counts)
        return float(any(judge.right(str(each), response) for each in references))


class _Judge:
    """Judges one response within one time limit."""

    def __init__(self, options: MathOptions, counts: Counter[str]) -> None:
        self.options = options
        self.counts = counts
        self.left = options.time_limit  # seconds
        self.comparison = Comparison(options, self.ask)

    def right(self, reference: str, response: str) -> bool:
        """Whether the response's final answer equals the reference's."""
        gold = extraction.final_answer(reference, "any", readable, words=False)
        golds = _listed(gold, self.options.boxes) if gold else [reference]
        if not any(each.strip() for each in golds):
            return False
        letter = choice_letter(golds[0]) if len(golds) == 1 else None
        if letter is None and gold is not None and gold.last == gold.words:
            letter = extraction.choice(reference)
        found = extraction.final_answer(response, self.options.format, readable)
        if letter is not None:
            return self._chose(letter, golds[0], found, response)
        if found is None:
            return self.options.format == "any" and same_text(golds[0], response)
        if self.options.format == "any" and not found.boxes and same_text(golds[0], response):
            return True
        if found.words and same_text(golds[0], found.words):
            return True
        try:
            return self._same(golds, found)
        except RecursionError:
            return False

    def _chose(self, letter: str, gold: str, found: extraction.Found | None, response: str) -> bool:
        if found is not None and found.boxes:
            right = choice_letter(found.last) == letter or same_text(gold, found.last)
            right = right or found.last.strip() == letter.lower()
        elif self.options.format == "boxed":
            return False
        else:
            right = extraction.choice(response, self.options.format) == letter
            whole = response.strip(" .()") == letter.lower() or same_text(gold, response)
            right = right or (self.options.format == "any" and whole)
        # "(B) 5": the value alone will do, too.
        return right or (found is not None and len(gold.strip()) > 3 and self._equal(gold, found.last))

    def _same(self, golds: list[str], found: extraction.Found) -> bool:
        if self.options.boxes == "all" and len(found.boxes) > 1:
            return self._joined(golds, found.boxes)
        if len(golds) == 1:
            if self._equal(golds[0], found.last):
                return True
        elif self._joined(golds, (found.last,)):
            return True
        if self.options.boxes == "last" or len(found.boxes) < 2:
            return False
        return self._joined(golds, found.boxes)

    def _joined(self, golds: Iterable[str], boxes: Iterable[str]) -> bool:
        """Several boxes as one list; a box that is repeated counts once."""
        return self._equal(", ".join(dict.fromkeys(golds)), ", ".join(dict.fromkeys(boxes)))

    def _equal(self, gold: str, answer: str) -> bool:
        if same_text(gold, answer):
            return True
        trees = list(readings(answer))
        for wanted in readings(gold):
            for node in trees:
                bare = without_unit(node)
                if self._same_value(wanted, node) or (bare is not None and self._same_value(wanted, bare)):
                    return True
        return False

    def _same_value(self, gold: Node, answer: Node) -> bool:
        """What has no value, such as 0/0, equals nothing but its own text."""
        try:
            return self.comparison.same(gold, answer)
        except Undefined:
            return False

    def ask(self, operation: str, *nodes: Node) -> bool | None:
        """SymPy's answer; None where it has none, or none in time."""
        size = sum(1 for node in nodes for _ in walk(node))
        if self.left <= 0 or size > MAX_NODES:
            return None
        key = (operation, *nodes)
        if key in _verdicts:
            return _verdicts.get(key)
        request = {"operation": operation, "nodes": [to_json(node) for node in nodes]}
        try:
            verdict, seconds = workers.pool().ask(request, self.left)
        except workers.OutOfTime:
            self.counts["timeouts"] += 1
            self.left = 0.0
            level = logging.WARNING if self.counts["timeouts"] == 1 else logging.DEBUG
            _log.log(level, "sympy_math: SymPy took over %g s; scored 0", self.options.time_limit)
            return None
        except workers.WorkerDied:
            self.counts["died"] += 1
            return None
        self.left -= seconds
        if size <= MAX_CACHED_NODES:
            _verdicts.put(key, verdict)
        return None if verdict is None else bool(verdict)


def _listed(found: extraction.Found, boxes: str) -> list[str]:
    """A reference with several boxes is a list."""
    return list(dict.fromkeys(found.boxes)) if boxes != "last" and len(found.boxes) > 1 else [found.last]


class _Verdicts:
    """The last answers of SymPy."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: OrderedDict[tuple[object, ...], bool | None] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, key: tuple[object, ...]) -> bool:
        return key in self._known

    def get(self, key: tuple[object, ...]) -> bool | None:
        """The known answer."""
        return self._known.get(key)

    def put(self, key: tuple[object, ...], verdict: bool | None) -> None:
        """Remember an answer, and forget the oldest over the bound."""
        with self._lock:
            self._known[key] = verdict
            while len(self._known) > self._size:
                self._known.popitem(last=False)


_verdicts = _Verdicts(CACHED_VERDICTS)
