"""The plugin table of a document, from the metadata of the projects.

Usage: python tools/plugin_table.py DOCUMENT PROJECT...

Rewrites what stands between the lines <!-- plugins --> and <!-- /plugins -->.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

KINDS = (
    "rollout_backend",
    "advantage_estimator",
    "policy_loss",
    "reward",
    "reward_manager",
    "data_converter",
    "checkpoint_exporter",
    "observer",
)
REGION = re.compile(r"(?<=<!-- plugins -->\n).*?(?=<!-- /plugins -->)", re.DOTALL)


def offered(project: Path) -> tuple[str, dict[str, list[str]]]:
    """The distribution's name, and what it offers of each kind."""
    data = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = data.get("entry-points", {})
    return data["name"], {kind: sorted(groups.get(f"posttune.{kind}", {})) for kind in KINDS}


def table(projects: list[Path]) -> str:
    """One row a kind: what core has, and what each other distribution adds."""
    core, *others = [offered(project) for project in projects]
    lines = ["| kind | built in | in a package of its own |", "|---|---|---|"]
    for kind in KINDS:
        own = ", ".join(f"`{name}`" for name in core[1][kind])
        added = ", ".join(f"`{name}` (`{dist}`)" for dist, kinds in others for name in kinds[kind])
        lines.append(f"| `{kind}` | {own} | {added} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Rewrite the document; 1 if it has no place for the table."""
    document = Path(arguments[0])
    text = document.read_text(encoding="utf-8")
    if not REGION.search(text):
        print(f"{document}: no <!-- plugins --> region", file=sys.stderr)
        return 1
    rows = table([Path(argument) for argument in arguments[1:]])
    document.write_text(REGION.sub(lambda _: rows, text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
