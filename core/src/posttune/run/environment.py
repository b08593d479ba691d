"""What a run ran on: versions, machine, git state, arguments. Written beside the run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from posttune._version import __version__
from posttune.config.places import named_plugins
from posttune.files import atomic_write_text

LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "peft",
    "safetensors",
    "numpy",
    "pyarrow",
    "pydantic",
    "pluggy",
    "stevedore",
    "vllm",
    "sglang",
)
_VARIABLES = ("OMP_", "MKL_", "CUDA_", "NCCL_", "GLOO_", "PYTORCH_", "TORCH_", "TOKENIZERS_", "POSTTUNE_")
GIT_SECONDS = 10


def write_environment(path: Path, config: Mapping[str, Any], argv: Sequence[str]) -> None:
    """Write ``environment.json``. A resumed run adds itself to the list ``resumes`` of what is there."""
    now = describe(config, argv)
    if path.is_file():
        first = json.loads(path.read_text("utf-8"))
        now = {**first, "resumes": [*first.get("resumes", []), now]}
    atomic_write_text(path, json.dumps(now, indent=2, ensure_ascii=False) + "\n")


def describe(config: Mapping[str, Any], argv: Sequence[str]) -> dict[str, Any]:
    """The environment of this process and of ``config``, a resolved configuration as plain data."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": list(argv),
        "seed": config["seed"],
        "versions": _versions(),
        "plugins": _plugins(config),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "machine": _machine(),
        "git": git_state(Path.cwd()),
        "variables": {key: os.environ[key] for key in sorted(os.environ) if key.startswith(_VARIABLES)},
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit and whether tracked files were changed; None outside a repository or without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {
        "commit": commit,
        "branch": _git(folder, "rev-parse", "--abbrev-ref", "HEAD"),
        "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no")),
    }


def _versions() -> dict[str, str]:
    versions = {"posttune": __version__}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _plugins(config: Mapping[str, Any]) -> dict[str, str]:
    """Distribution and version of every plugin that the configuration names, by ``kind name``."""
    from posttune.catalog import Catalog

    catalog = Catalog()
    found = {}
    for named in named_plugins(config):
        plugin = catalog.check(named.kind, named.ref.name, engine=False)
        found[f"{named.kind} {named.ref.name}"] = f"{canonicalize_name(plugin.distribution)} {plugin.version}"
    return found


def _machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "cpus_allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "accelerators": _accelerators(),
    }


def _accelerators() -> list[str]:
    """Names of the GPUs, if torch is loaded: this module does not load it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
