"""Every fenced block of the documents is run or checked. A comment before the fence says how.

<!-- block: run -->          bash or python: run in the document's own folder, must succeed
<!-- block: file NAME -->    written to that folder
<!-- block: config -->       a whole configuration: checked
<!-- block: rl -->           a part of an rl stage: checked within a whole configuration
<!-- block: rl with FOLDER --> the same, with the plugins that a block before installed into that folder
<!-- block: same PATH -->    a file of examples/, letter for letter, written to that folder
<!-- block: template PATH --> a part of what `posttune new KIND mine` makes, letter for letter
<!-- block: engine -->       the same with an engine: that it is not installed may be its only problem
<!-- block: dry -->          downloads or trains: targets exist, commands and options exist, packages are ours
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import jinja2
import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("plugins/*/README.md")),
]
TEMPLATES = ROOT / "core/src/posttune/template/templates"
BLOCK = re.compile(
    r"(?:^<!-- block: (?P<how>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)#\s]+)(?:#[^)]*)?\)")


@dataclass(frozen=True)
class Block:
    """A fenced block and what its comment says of it."""

    how: str
    argument: str
    language: str
    text: str
    line: int


def blocks(document: Path) -> list[Block]:
    """The fenced blocks of a document, in order."""
    text = document.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        how, _, argument = (match["how"] or "").partition(" ")
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(how, argument.strip(), match["language"], match["text"], line))
    return found


def run(command: list[str], folder: Path, **environment: str) -> str:
    """Run a command with the environment's programs first; its output, or the test fails with it."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def check_run(block: Block, folder: Path) -> None:
    """The block succeeds."""
    if block.language == "python":
        run([sys.executable, "-c", block.text], folder)
    else:
        run(["bash", "-euo", "pipefail", "-c", block.text], folder)


def check_file(block: Block, folder: Path) -> None:
    """The block becomes a file for the blocks after it."""
    path = folder / block.argument
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text, encoding="utf-8")
    if path.suffix in (".yaml", ".yml"):
        run(["posttune", "config", "check", block.argument], folder)


def check_config(block: Block, folder: Path) -> None:
    """The block is a valid configuration."""
    (folder / "block.yaml").write_text(block.text, encoding="utf-8")
    run(["posttune", "config", "check", "block.yaml"], folder)


def check_rl(block: Block, folder: Path) -> None:
    """The block is valid within an rl stage."""
    write_rl(block, folder)
    installed = block.argument.removeprefix("with ")
    environment = {"PYTHONPATH": str(folder / installed)} if installed else {}
    run(["posttune", "config", "check", "block.yaml"], folder, **environment)


def check_same(block: Block, folder: Path) -> None:
    """The block is a file of the examples, and is written."""
    assert block.text == (ROOT / "examples" / block.argument).read_text(encoding="utf-8"), block.argument
    (folder / block.argument).write_text(block.text, encoding="utf-8")


def check_template(block: Block, folder: Path) -> None:
    """The block is a part of what the template makes of a plugin that is called mine."""
    loader = jinja2.FileSystemLoader(TEMPLATES)
    names = {"name": "mine", "__class": "Mine", "__module": "posttune_mine"}
    template = jinja2.Environment(loader=loader, autoescape=False).get_template(f"{block.argument}.jinja")
    assert block.text.strip() in template.render(cookiecutter=names), block.argument


def check_engine(block: Block, folder: Path) -> None:
    """The block is valid within an rl stage, in an environment that has the engine."""
    write_rl(block, folder)
    command = [Path(sys.executable).with_name("posttune"), "config", "check", "block.yaml", "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    problems = json.loads(done.stdout)["problems"]
    assert all("is not installed (next: pip install" in each["message"] for each in problems), problems


def write_rl(block: Block, folder: Path) -> None:
    """A whole configuration around a part of an rl stage."""
    yaml = YAML(typ="safe", pure=True)
    stage = {"model": "model", "data": "data", "steps": 1, "rewards": [{"name": "gsm8k"}]}
    stage |= yaml.load(block.text)
    with (folder / "block.yaml").open("w", encoding="utf-8") as file:
        yaml.dump({"output": "runs/block", "stages": {"rl": stage}}, file)


def check_dry(block: Block, folder: Path) -> None:
    """Every command of the block exists, with its options; nothing is run."""
    for line in block.text.splitlines():
        words = shlex.split(line, comments=True)
        if words:
            DRY[words[0].rpartition("/")[2]](words[1:], folder)


def dry_make(words: list[str], folder: Path) -> None:
    """The targets exist."""
    run(["make", "--dry-run", "--directory", str(ROOT), *words], folder)


def dry_pip(words: list[str], folder: Path) -> None:
    """What is installed is a distribution of this repository, with files that are there."""
    assert words[0] == "install"
    projects = [ROOT / "core", *(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]
    names = {
        name for project in projects for name in re.findall(r'^name = "(.*)"$', read(project), re.MULTILINE)
    }
    files = [file for option, file in pairwise(words) if option in ("-c", "-r")]
    assert all((ROOT / file).is_file() for file in files), files
    named = [word for word in words[1:] if not word.startswith("-") and word not in files]
    assert {word.partition("[")[0] for word in named} <= names


def read(project: Path) -> str:
    """The metadata of a project."""
    return (project / "pyproject.toml").read_text(encoding="utf-8")


def dry_posttune(words: list[str], folder: Path) -> None:
    """The command and its options exist."""
    count = 2 if words[0] in ("config", "data", "models", "plugins", "selftest") else 1
    text = run(["posttune", *words[:count], "--help"], folder)
    for word in words[count:]:
        if word.startswith("--"):
            assert word in text, f"{word} is no option of posttune {' '.join(words[:count])}"


def dry_ray(words: list[str], folder: Path) -> None:
    """The options exist."""
    text = run([sys.executable, "-m", "posttune_ray", "--help"], folder)
    assert all(word in text for word in words if word.startswith("--")), words


def dry_tool(words: list[str], folder: Path) -> None:
    """A program of the environment, not run here."""


DRY = {
    "make": dry_make,
    "pip": dry_pip,
    "posttune": dry_posttune,
    "posttune-ray": dry_ray,
    "torchrun": dry_tool,
    "cd": dry_tool,
    "pre-commit": dry_tool,
    "cookiecutter": dry_tool,
    "python": dry_tool,
}
CHECKS = {
    "run": check_run,
    "file": check_file,
    "config": check_config,
    "same": check_same,
    "template": check_template,
    "rl": check_rl,
    "engine": check_engine,
    "dry": check_dry,
}


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_works(document: Path, tmp_path: Path) -> None:
    for name in ("configs", "plugin_template"):
        (tmp_path / name).symlink_to(ROOT / name)
    for block in blocks(document):
        assert block.how in CHECKS, f"{document.name}:{block.line}: say how this block is tested"
        CHECKS[block.how](block, tmp_path)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_fences_are_balanced_and_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert text.count("\n```") == 2 * len(blocks(document))
    for match in LINK.finditer(text):
        target = match["target"]
        if not target.startswith(("http://", "https://")):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_plugin_table_is_that_of_the_metadata(tmp_path: Path) -> None:
    document = tmp_path / "README.md"
    document.write_text((ROOT / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    projects = [ROOT / "core", *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]
    run([sys.executable, str(ROOT / "tools/plugin_table.py"), str(document), *map(str, projects)], tmp_path)
    now, right = (path.read_text(encoding="utf-8") for path in (ROOT / "README.md", document))
    assert now == right, "make readme"


def test_a_block_without_a_comment_is_noticed(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("text\n\n```bash\nfalse\n```\n", encoding="utf-8")
    (block,) = blocks(document)
    assert block.how not in CHECKS
