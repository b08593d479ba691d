"""Whether ranges of versions exclude each other: never said where a version satisfies all of them."""

from __future__ import annotations

import itertools
import random

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from posttune.doctor.ranges import disjoint

DISJOINT = [
    ("==2.11.0", "==2.13.0"),
    ("==2.11.0", ">=2.12"),
    ("==2.11.*", ">=2.12"),
    ("~=2.11.0", ">=2.12"),
    (">=2,<3", ">=3"),
    ("<2", ">2"),
    (">2.0", "==2.0.*,!=2.0.*"),
    ("==1.0+cpu", "==1.0+cu12"),
    (">=1.0,!=1.0,!=1.0.*", "==1.0"),
    ("<1.0", "==1.0rc1"),
    (">1.0", "==1.0.post1"),
    (">1.0", "==1.0+local"),
    ("==1!1.0", "<2"),
    ("===1.0", "==2.0"),
    ("<1.0", ">=1.0.dev0"),
    (">=1.5,<1.5", ">0"),
]
TOGETHER = [
    ("==2.11.0", ">=2.11"),
    ("==2.11.*", "==2.11.3"),
    ("~=2.11", ">=2.14,<3"),
    (">=2,<3", "!=2.0,!=2.1"),
    (">1,<2", ">1.0.0.1,<1.0.0.2"),
    (">1.0,<1.0.1", ">0"),
    ("<2,>1.9999", "!=1.99999"),
    ("==1.0", "==1.0+cpu"),
    (">=0.1,<0.2", ""),
    ("", ""),
    (">2", ""),
    ("<0.0.1", ""),
    ("===odd", ""),
]


@pytest.mark.parametrize(("left", "right"), DISJOINT)
def test_these_exclude_each_other(left: str, right: str) -> None:
    assert disjoint(SpecifierSet(left), SpecifierSet(right))
    assert disjoint(SpecifierSet(right), SpecifierSet(left))


@pytest.mark.parametrize(("left", "right"), TOGETHER)
def test_these_go_together(left: str, right: str) -> None:
    assert not disjoint(SpecifierSet(left), SpecifierSet(right))


VERSIONS = [
    Version(f"{epoch}{release}{suffix}")
    for epoch in ("", "1!")
    for release in ("0", "0.1", "1", "1.0.1", "1.1", "1.1.1", "1.2", "2", "2.0.1", "2.1", "3")
    for suffix in ("", ".dev0", ".dev1", "a1", "rc1", "rc1.post1", ".post0", ".post1", ".post1.dev1", "+x")
]


def random_range(draw: random.Random) -> SpecifierSet:
    parts = []
    for _ in range(draw.randint(1, 3)):
        version = draw.choice(VERSIONS)
        operator = draw.choice(["==", "!=", "<", "<=", ">", ">=", "~=", "==*", "!=*"])
        text = version.public
        if operator.endswith("*"):
            text = ".".join(map(str, version.release)) + ".*"
            text = f"{version.epoch}!{text}" if version.epoch else text
        if operator == "~=" and len(version.release) < 2:
            operator = ">="
        if operator in ("==", "!=") and version.local:
            text = str(version)
        parts.append(operator.rstrip("*") + text)
    return SpecifierSet(",".join(parts))


@pytest.mark.parametrize("seed", range(4))
def test_no_range_with_a_version_in_common_is_called_disjoint(seed: int) -> None:
    """Sound against a grid of versions, and complete against packaging's own answer where it has one."""
    draw = random.Random(seed)
    outcomes = []
    for _ in range(150):
        left, right = random_range(draw), random_range(draw)
        common = [v for v in VERSIONS if left.contains(v, prereleases=True) and right.contains(v, True)]
        said = disjoint(left, right)
        assert not (said and common), (str(left), str(right), common[0])
        outcomes.append(said)
        known = getattr(left & right, "is_unsatisfiable", None)
        if known is not None and known():
            assert said, (str(left), str(right))
    assert len(set(outcomes)) == 2


def test_every_pair_of_exact_pins() -> None:
    for left, right in itertools.product(VERSIONS[:30], repeat=2):
        pins = SpecifierSet(f"=={left}"), SpecifierSet(f"=={right}")
        assert disjoint(*pins) == (not (pins[0].contains(right, True) or pins[1].contains(left, True)))
