"""The interpreter, torch, the GPUs and the disk. torch is not imported."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.version import InvalidVersion, Version

import posttune
from posttune._version import API, __version__
from posttune.doctor.findings import Finding
from posttune.doctor.inventory import Inventory, version_of

GIB = 2**30
LITTLE_SPACE = 10 * GIB
SMI_DEADLINE = 15.0
# What NVIDIA's release notes of CUDA name as the oldest driver on Linux, by major version of CUDA.
OLDEST_DRIVER = {"11": "450.80", "12": "525.60", "13": "580.65"}


def machine_findings(inventory: Inventory) -> Iterator[Finding]:
    """What this machine is."""
    yield _python()
    yield _core()
    yield from _torch_and_gpu(inventory)
    yield _disk(Path.cwd())


def _python() -> Finding:
    kind = "environment" if sys.prefix != sys.base_prefix else "system installation"
    cause = f"Python {sys.version.split()[0]} at {sys.executable}, {kind} {sys.prefix}"
    return Finding("python", "info", "python", cause, "python -m venv .venv makes another environment")


def _core() -> Finding:
    place = Path(posttune.__file__).parent
    return Finding("core", "info", "posttune", f"{__version__}, API {API}, in {place}", "posttune version")


def _torch_and_gpu(inventory: Inventory) -> Iterator[Finding]:
    gpus = _gpus()
    distribution = inventory.get("torch")
    if distribution is None:
        yield Finding("torch-missing", "error", "torch", "it is not installed", 'pip install "torch>=2.11"')
        return
    version, cuda = version_of(distribution), cuda_of(Path(str(distribution.locate_file("torch/version.py"))))
    built = f"built for CUDA {cuda}" if cuda else "built for the CPU"
    yield Finding("torch", "info", "torch", f"{version}, {built}", "posttune version")
    for gpu in gpus:
        yield Finding("gpu", "info", "gpu", gpu, "nvidia-smi")
    if gpus and not cuda:
        cause = f"{len(gpus)} GPU, and torch {version} was built for the CPU"
        fix = "pip install --force-reinstall torch, from the index that fits your CUDA"
        yield Finding("torch-without-cuda", "warning", "torch", cause, fix)
    if gpus and cuda:
        yield from _driver(gpus[0], cuda)


def cuda_of(file: Path) -> str:
    """The CUDA that torch was built for, from its version.py; empty for a CPU build."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found[1] if found else ""


def _gpus() -> list[str]:
    """Name, driver and memory of every GPU; none where there is no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = "--query-gpu=name,driver_version,memory.total"
    try:
        done = subprocess.run(
            [program, query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=SMI_DEADLINE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode != 0:
        return []
    rows = [[part.strip() for part in line.split(",")] for line in lines]
    return [f"{row[0]}, driver {row[1]}, {row[2]}" for row in rows if len(row) == 3]


def _driver(gpu: str, cuda: str) -> Iterator[Finding]:
    found = re.search(r"driver ([\d.]+)", gpu)
    oldest = OLDEST_DRIVER.get(cuda.partition(".")[0])
    if found is None or oldest is None:
        return
    try:
        old = Version(found[1]) < Version(oldest)
    except InvalidVersion:
        return
    if old:
        cause = f"driver {found[1]}, and CUDA {cuda} needs {oldest} or newer"
        yield Finding(
            "driver-old", "error", "gpu", cause, "install a newer driver, or a torch for older CUDA"
        )


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    cause = f"{free / GIB:.1f} GiB free at {folder}"
    if free < LITTLE_SPACE:
        return Finding("disk-low", "warning", "disk", cause, f"df -h {folder}; set output: to a larger disk")
    return Finding("disk", "info", "disk", cause, f"df -h {folder}")
