"""Whether two ranges of versions have a version in common.

PEP 440 orders versions densely, so that a range is a union of intervals whose ends are versions that
its specifiers name, or the first version of a prefix. The common part of several ranges is not empty
exactly if it holds one of those ends, or a point just above or below one. Those are the candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from packaging.specifiers import Specifier, SpecifierSet
from packaging.version import InvalidVersion, Version

FAR = 10**9  # of a number in a version: later than any that is in use


def disjoint(*ranges: SpecifierSet) -> bool:
    """Whether no version at all lies in every range. Pre-releases count as versions."""
    specifiers = [specifier for each in ranges for specifier in each]
    exact = [each.version for each in specifiers if each.operator == "==="]
    if exact:
        return not _all_hold(specifiers, exact[0])
    return not any(_all_hold(specifiers, candidate) for candidate in candidates(specifiers))


def candidates(specifiers: Iterable[Specifier]) -> Iterator[Version]:
    """Versions of which at least one lies in the common range, unless that is empty."""
    bounds = [Version(each.version.removesuffix(".*")) for each in specifiers]
    length = max((len(bound.release) for bound in bounds), default=1)
    yield Version("0.dev0")
    yield Version(f"{FAR}")
    for bound in bounds:
        yield bound
        yield from _neighbours(bound)
        for release in _releases(bound, length):
            base = f"{bound.epoch}!{'.'.join(map(str, release))}"
            for suffix in (".dev0", "a0", f"rc{FAR}", "", ".post0", f".post{FAR}"):
                yield Version(base + suffix)
    for epoch in {bound.epoch for bound in bounds}:
        yield Version(f"{epoch}!0.dev0")
        yield Version(f"{epoch}!{FAR}")


def _releases(bound: Version, length: int) -> Iterator[tuple[int, ...]]:
    """The release itself, the one that ends each of its prefixes, and what lies just above and below."""
    release = bound.release
    ends = [release, *((*release[:at], release[at] + 1) for at in range(len(release)))]
    for end in ends:
        padded = (*end, *([0] * (length - len(end))))
        yield end
        yield (*padded, 0, 1)
        yield from _before(padded)


def _before(release: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for at in reversed(range(len(release))):
        if release[at]:
            yield (*release[:at], release[at] - 1, FAR)
            return


def _neighbours(bound: Version) -> Iterator[Version]:
    """The versions just above and just below one."""
    text = bound.public
    yield Version(f"{text}+0")
    if bound.dev is not None:
        stem = text.rpartition(".dev")[0]
        yield Version(f"{stem}.dev{bound.dev + 1}")
        if bound.dev:
            yield Version(f"{stem}.dev{bound.dev - 1}")
        yield Version(f"{stem}.dev{FAR}")
        yield Version(stem)
        return
    yield Version(f"{text}.dev0")
    yield Version(f"{text}.dev{FAR}")
    if bound.post is None:
        yield Version(f"{text}.post0")
        yield Version(f"{text}.post{FAR}")
        return
    stem = text.rpartition(".post")[0]
    yield Version(f"{stem}.post{bound.post + 1}.dev0")
    yield Version(f"{stem}.post{bound.post + 1}")
    if bound.post:
        yield Version(f"{stem}.post{bound.post - 1}")


def _all_hold(specifiers: Iterable[Specifier], version: Version | str) -> bool:
    """Where a version is no version at all, nothing can be said, and the ranges count as compatible."""
    try:
        return all(each.contains(version, prereleases=True) for each in specifiers)
    except InvalidVersion:
        return True
