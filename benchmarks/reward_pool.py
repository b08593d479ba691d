"""How worker processes for rewards cope with samples that hang.

Scores a batch twice, without and with a share of samples that hang, and compares the throughputs:
with hung samples it should be at least 80 % of that without, times the share of the workers' time that
was not spent waiting for them. Prints one JSON document.

Usage: python benchmarks/reward_pool.py [--samples N] [--hanging SHARE] [--workers K] [--timeout S] [--work S]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from posttune.config.base import RewardRef
from posttune.facade import Rewards, build_rewards
from posttune.types import Sample

REWARD = """
import time

def score(response, seconds):
    if response == "hang":
        time.sleep(1e6)
    time.sleep(seconds)
    return float(len(response))
"""


def rewards(folder: Path, workers: int, timeout: float) -> Rewards:
    """One reward in ``workers`` processes, which have started."""
    path = folder / "pool_reward.py"
    path.write_text(REWARD, encoding="utf-8")
    ref = RewardRef(
        name="function",
        options={"path": f"{path}:score"},
        executor="process",
        workers=workers,
        timeout=timeout,
    )
    made = build_rewards([ref])
    made.score(samples(10 * workers, 0, 0.01))
    return made


def samples(count: int, hanging: int, work: float) -> list[Sample]:
    """So many samples, of which some hang, spread evenly."""
    hung = {round(i * count / hanging) for i in range(hanging)} if hanging else set()
    texts = ["hang" if i in hung else "fine" for i in range(count)]
    return [Sample(str(i), 0, "", text, columns={"seconds": work}) for i, text in enumerate(texts)]


def measure(made: Rewards, batch: list[Sample]) -> tuple[float, int]:
    """Seconds for the batch, and how many samples ran out of time."""
    began = time.perf_counter()
    made.score(batch)
    return time.perf_counter() - began, made.stats["function"].timeouts


def main() -> None:
    """Measure both, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--hanging", type=float, default=0.01)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=1.0)
    parser.add_argument("--work", type=float, default=0.01, help="seconds that a good sample takes")
    options = parser.parse_args()
    hanging = round(options.samples * options.hanging)
    with tempfile.TemporaryDirectory() as folder:
        made = rewards(Path(folder), options.workers, options.timeout)
        plain, _ = measure(made, samples(options.samples, 0, options.work))
        hung, timeouts = measure(made, samples(options.samples, hanging, options.work))
        made.close()
    share_left = 1 - timeouts * options.timeout / (options.workers * hung)
    reached = plain / hung / share_left
    document = {
        **vars(options),
        "per_s_none_hanging": options.samples / plain,
        "per_s_some_hanging": options.samples / hung,
        "timeouts": timeouts,
        "share_of_workers_left": share_left,
        "throughput_to_share_left": reached,
        "at_least": 0.8,
        "passed": reached >= 0.8 and timeouts == hanging,
    }
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
