"""SGLang as this plugin knows it."""

from __future__ import annotations

from packaging.version import Version
from posttune.engines.installed import Engine

WHO = "rollout 'sglang'"
SGLANG = Engine(
    who=WHO,
    name="SGLang",
    package="sglang",
    distributions={"sglang": ("cuda", "cpu")},
    oldest=Version("0.5.17"),
    newest=Version("0.5.23"),
    install={
        "cpu": "install it with the cpu file of the plugin's folder constraints/ (README: Installation)",
        "cuda": "pip install 'posttune-sglang[engine]' in an environment of its own (README: Installation)",
    },
    compiled=("cuda",),  # on a CPU it runs from its Python sources
)
