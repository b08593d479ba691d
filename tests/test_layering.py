"""The law of layers, read from the source: who may import whom.

- The plugin layer imports nothing of the training layer, and no heavy library, when it is imported.
- The modules that entry points name import no heavy library either; they may inside their hooks.
- Core imports no plugin package. A plugin imports posttune from its public names only.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import posttune
import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core" / "src"

TRAINING = (
    "advantage", "checkpoint", "data", "distributed", "evaluate", "loss", "memory", "models", "observers",
    "optim", "plan", "reward", "rollout", "selftest", "trainer",
)  # fmt: skip
HEAVY = (
    "accelerate", "bert_score", "datasets", "gguf", "peft", "pyarrow", "ray", "safetensors", "sglang",
    "sympy", "tokenizers", "torch", "transformers", "vllm",
)  # fmt: skip
PUBLIC = ("posttune.engines", "posttune.errors", "posttune.testing", "posttune.types", "posttune.workers")


@dataclass(frozen=True)
class Import:
    """An import statement. ``name`` is the module, or the module and the name taken from it."""

    path: Path
    line: int
    name: str

    def of(self, package: str) -> bool:
        return self.name == package or self.name.startswith(package + ".")

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.name}"


def imports(path: Path, *, inside: bool) -> Iterator[Import]:
    """The imports of a file; ``inside`` also those within functions. Never those for types alone."""
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"), str(path))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (Import(path, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (Import(path, node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif inside or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def plugin_layer(core: Path) -> list[Path]:
    """The public files of core that are not in the training layer. A private one may do heavy work."""
    package = core / "posttune"
    files = [path for path in package.rglob("*.py") if path.relative_to(package).parts[0] not in TRAINING]
    return [path for path in files if "template" not in path.parts and not _private(path)]


def _private(path: Path) -> bool:
    return path.name.startswith("_") and not path.name.startswith("__")


def entry_point_modules(project: Path) -> list[Path]:
    """The files that a project's entry points name."""
    points = tomllib.loads(project.read_text(encoding="utf-8"))["project"].get("entry-points", {})
    modules = {target.partition(":")[0] for names in points.values() for target in names.values()}
    found = []
    for module in sorted(modules):
        path = project.parent / "src" / Path(*module.split("."))
        found.append(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
    return found


def upward_imports(core: Path) -> list[str]:
    """What the plugin layer imports of the training layer, or of heavy libraries."""
    forbidden = [f"posttune.{package}" for package in TRAINING] + list(HEAVY)
    return [
        str(each)
        for path in plugin_layer(core)
        for each in imports(path, inside=False)
        if any(each.of(package) for package in forbidden)
    ]


def heavy_entry_points(projects: list[Path]) -> list[str]:
    """Heavy libraries that the modules of entry points import at once."""
    return [
        str(each)
        for project in projects
        for path in entry_point_modules(project)
        for each in imports(path, inside=False)
        if any(each.of(library) for library in HEAVY)
    ]


def imports_of_plugins(core: Path) -> list[str]:
    """What core imports of any plugin package, wherever the statement stands."""
    files = [path for path in core.rglob("*.py") if "template" not in path.parts]
    found = [each for path in files for each in imports(path, inside=True)]
    return [str(each) for each in found if each.name.startswith("posttune_")]


def private_imports(plugins: Path) -> list[str]:
    """What plugins import of posttune that is not public."""
    files = list(plugins.glob("*/src/**/*.py"))
    found = [each for path in files for each in imports(path, inside=True) if each.of("posttune")]
    return [str(each) for each in found if not _public(each)]


def _public(each: Import) -> bool:
    names = {"posttune", *(f"posttune.{name}" for name in posttune.__all__)}
    return each.name in names or any(each.of(module) for module in PUBLIC)


def projects() -> list[Path]:
    """The projects of this repository."""
    return [ROOT / "core" / "pyproject.toml", *sorted((ROOT / "plugins").glob("*/pyproject.toml"))]


def test_the_plugin_layer_imports_nothing_of_the_training_layer() -> None:
    assert len(plugin_layer(CORE)) > 20
    assert upward_imports(CORE) == []


def test_the_modules_of_entry_points_are_light() -> None:
    assert len(entry_point_modules(projects()[0])) > 10
    assert heavy_entry_points(projects()) == []


def test_core_imports_no_plugin_package() -> None:
    assert imports_of_plugins(CORE) == []


def test_plugins_import_public_names_only() -> None:
    assert private_imports(ROOT / "plugins") == []


def test_every_package_of_core_has_a_layer() -> None:
    known = {
        *TRAINING,
        "cli",
        "config",
        "doctor",
        "engines",
        "execution",
        "facade",
        "run",
        "template",
        "testing",
    }
    packages = {path.parent.name for path in (CORE / "posttune").glob("*/__init__.py")}
    assert packages <= known, "say in this test to which layer the new package belongs"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "caught"),
    [
        ("import torch\n", True),
        ("from torch import Tensor\n", True),
        ("import torch.nn as nn\n", True),
        ("class A:\n    import transformers\n", True),
        ("try:\n    from posttune.trainer import rl\nexcept ImportError:\n    pass\n", True),
        ("from posttune import trainer\n", True),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import torch\n", True),
        ("if TYPE_CHECKING:\n    import torch\n", False),
        ("def f():\n    import torch\n", False),
        ("import torchvision_like\n", False),
        ("from posttune.types import Sample\n", False),
    ],
)
def test_the_walk_sees_what_it_should(tmp_path: Path, text: str, caught: bool) -> None:
    _write(tmp_path / "posttune" / "catalog.py", text)
    _write(tmp_path / "posttune" / "trainer" / "rl.py", "import torch\n")
    assert bool(upward_imports(tmp_path)) is caught


def test_the_other_walks_see_what_they_should(tmp_path: Path) -> None:
    _write(tmp_path / "core" / "posttune" / "a.py", "def f():\n    import posttune_vllm.engine\n")
    assert len(imports_of_plugins(tmp_path / "core")) == 1
    source = "from posttune import hookimpl\nfrom posttune.types import Sample\n"
    _write(tmp_path / "plugins" / "p" / "src" / "posttune_p" / "a.py", source)
    assert private_imports(tmp_path / "plugins") == []
    _write(
        tmp_path / "plugins" / "p" / "src" / "posttune_p" / "b.py", "from posttune.catalog import Catalog\n"
    )
    assert len(private_imports(tmp_path / "plugins")) == 1
    _write(tmp_path / "plugins" / "p" / "src" / "posttune_p" / "__init__.py", "import torch\n")
    points = '[project.entry-points."posttune.reward"]\np = "posttune_p:P"\n'
    _write(tmp_path / "plugins" / "p" / "pyproject.toml", "[project]\nname = 'p'\n" + points)
    assert len(heavy_entry_points([tmp_path / "plugins" / "p" / "pyproject.toml"])) == 1
