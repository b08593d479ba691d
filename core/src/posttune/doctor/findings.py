"""What the doctor can find: a code, how grave it is, whom it is about, why, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One finding. ``fix`` is a command, or where there is none the thing to do."""

    code: str
    severity: Severity
    subject: str
    cause: str
    fix: str


CODES: dict[str, str] = {
    "python": "the interpreter, and where its packages are",
    "core": "the version of posttune, its API, and where it is installed",
    "torch": "the version of torch and the CUDA that it was built for",
    "torch-missing": "torch is not installed: nothing can be trained",
    "torch-without-cuda": "there is a GPU, and this build of torch cannot use it",
    "gpu": "the GPUs and their driver",
    "driver-old": "the driver is older than the CUDA of this torch needs",
    "disk": "the free space where runs are written",
    "disk-low": "too little space for checkpoints",
    "plugin": "a distribution with plugins, and what it offers",
    "distribution-twice": "two versions of a distribution lie on the path; which one is used is chance",
    "metadata-damaged": "the metadata of a distribution cannot be read",
    "entry-point-dangling": "an entry point names a module that is not there",
    "entry-point-malformed": "an entry point does not read module:attribute",
    "api-mismatch": "a plugin does not accept this version of posttune",
    "name-twice": "two distributions offer a plugin of the same kind and name",
    "blocked": "POSTTUNE_BLOCK forbids a plugin",
    "requirement-missing": "something that a plugin requires is not installed",
    "requirement-conflict": "something that a plugin requires is installed in a wrong version",
    "requirement-damaged": "a requirement of a plugin cannot be read",
    "engine-missing": "the engine of a plugin, its extra [engine], is not installed",
    "engine-conflict": "the engine of a plugin is installed in a version that it does not support",
    "pins-disjoint": "no environment can satisfy two plugins: they ask for versions that exclude each other",
    "import-failed": "a plugin's module, or its engine, cannot be imported",
    "import-crashed": "the interpreter died while it imported",
    "import-timeout": "an import did not end in time",
    "import-heavy": "importing a plugin imports a library that should wait until it is used",
    "imported": "what --import could import",
    "plan-possible": "an environment exists that satisfies what was asked",
    "plan-impossible": "no environment satisfies what was asked",
    "plan-unknown": "the resolver could not answer: it is missing, has no network, or took too long",
}
"""Every code with its meaning. A test holds this against what the modules raise."""
