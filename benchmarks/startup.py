"""Start-up time of commands that load no model, against `python -c pass`, and whether they load torch.

Usage: python benchmarks/startup.py [--repeat N]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "posttune --help": ["-m", "posttune", "--help"],
    "posttune plugins list": ["-m", "posttune", "plugins", "list"],
    "posttune config check": ["-m", "posttune", "config", "check", "configs/quickstart.yaml"],
}
HEAVY = ("torch", "transformers", "pyarrow")


def seconds(arguments: list[str]) -> float:
    """Wall time of one fresh interpreter."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def heavy_modules(arguments: list[str]) -> list[str]:
    """The heavy packages that the command has imported when it ends."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, check=True
    )
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    return [name for name in HEAVY if name in loaded]


def main() -> None:
    """Print one line a command."""
    parser = argparse.ArgumentParser(description="Measure start-up times.")
    parser.add_argument("--repeat", type=int, default=11)
    repeat = parser.parse_args().repeat
    base = 0.0
    print(f"{'command':<24} {'median s':>9} {'over pass':>10}  heavy imports")
    for name, arguments in COMMANDS.items():
        seconds(arguments)  # byte code and disk cache
        median = statistics.median(seconds(arguments) for _ in range(repeat))
        base = base or median
        loaded = ", ".join(heavy_modules(arguments)) or "none"
        print(f"{name:<24} {median:>9.3f} {median - base:>10.3f}  {loaded}")


if __name__ == "__main__":
    main()
