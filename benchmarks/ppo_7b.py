"""Speed and memory of some steps of a recipe, without checkpoints and exports: plan against measured.

    python benchmarks/random_model.py models/qwen2.5-7b
    M=models/qwen2.5-7b
    python benchmarks/ppo_7b.py configs/ppo_7b_one_gpu.yaml --model $M --limit-gb 42.9 --least 470
    python benchmarks/ppo_7b.py configs/ppo_7b_one_h200.yaml --model $M --least 2500

Prompts are made here (about 100 tokens each), so no data is needed; random weights hardly ever end an
answer, so every one has all its tokens. The critic's warm-up is left out: every step updates both models.
Tokens a second are those of the answers, over the whole step: rollout, rewards, values, both updates and
the hand-over; the first step also compiles and does not count. The GPU's memory is that of the whole
device, whoever uses it, looked at every 5 ms. With --limit-gb torch's allocator may hold what the limit
leaves beside --others-gb (CUDA's contexts and the sleeping engine), as it would on a GPU of that size.
--try takes one more step with other settings each, in the same process.
The last line is one JSON document. Exit code 1: above the limit, or below the least speed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from posttune.config.load import check_config
from posttune.config.models import ModelConfig, RlStage, RunConfig
from posttune.data.conversion import ConvertRequest, convert
from posttune.distributed.ranks import Ranks
from posttune.errors import PosttuneError
from posttune.facade import build_observers
from posttune.memory.ledger import LEDGER, now
from posttune.models.load import prepare as prepare_model
from posttune.plan.estimate import Setting, plan_run
from posttune.run.folder import RunFolder
from posttune.run.interrupt import InterruptFlag
from posttune.run.stages import StageContext
from posttune.trainer.loop import Position
from posttune.trainer.rl import prepare
from posttune.trainer.rl_step import RlWork

GIB = 2**30
SENTENCE = (
    "Here is a task about numbers, and the answer to it is a number: what do you get for {} plus {}, dear?"
)


class Watch:
    """The most that is used of the device, by phase."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.most: dict[str, int] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Look every 5 ms while the block runs."""
        end = threading.Event()
        thread = threading.Thread(target=self._look, args=(end,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()

    def _look(self, end: threading.Event) -> None:
        while not end.wait(0.005):
            allocated, _, used = now(self.device)
            phase = LEDGER.present or "between"
            self.most[phase] = max(self.most.get(phase, 0), used or allocated)


def rows(folder: Path, count: int, model: str) -> Path:
    """A dataset of ``count`` prompts."""
    lines = [
        json.dumps({"prompt": SENTENCE.format(n, n + 1), "response": str(2 * n + 1)}) for n in range(count)
    ]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    convert(ConvertRequest([folder / "rows.jsonl"], folder / "data", tokenizer=Path(model)))
    return folder / "data"


def load(recipe: str, model: str, data: Path, overrides: Sequence[str]) -> RunConfig:
    """The recipe's RL stage alone, with this model and this data."""
    reward = "rl.rewards=[{name: length, options: {target: 400}}]"
    given = [f"rl.model.path={model}", f"rl.data={data}", "observers=[]", reward, "rl.critic.warmup_steps=0"]
    whole = check_config(recipe, [*given, *overrides]).config
    return whole.model_copy(update={"stages": {"rl": whole.stages["rl"]}})


@contextmanager
def ready(run: RunConfig, folder: Path) -> Iterator[tuple[RlWork, StageContext]]:
    """The stage's work, with engine and models loaded."""
    stage = run.stages["rl"]
    assert isinstance(stage, RlStage)
    context = StageContext(
        run=run,
        name="rl",
        folder=RunFolder(folder / "run"),
        observers=build_observers([]),
        resume=False,
        outputs={},
        interrupt=InterruptFlag(),
        ranks=Ranks.current(run.device, parallel=run.parallel),
    )
    with ExitStack() as stack:
        work = prepare(stage, context, stack).work
        assert isinstance(work, RlWork)
        yield work, context


def measure(
    run: RunConfig, folder: Path, steps: int, tries: Sequence[str], note: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """Metrics of every step, seconds of the start, and the device's memory by phase.

    ``note`` takes what is known before the tries, which may not come to an end.
    """
    began = time.perf_counter()
    with ready(run, folder) as (work, context):
        watch = Watch(context.ranks.device)
        with watch.running():
            work.begin(Position())
            started = time.perf_counter() - began
            print(f"ready in {started:.1f} s", flush=True)
            found, position = [], Position()
            for _ in range(steps):
                output = work.step(position)
                position = position.after(output.rows)
                found.append(output.metrics)
                print(line(output.metrics), flush=True)
            print(LEDGER.table(), flush=True)
            tried: list[dict[str, Any]] = []
            known = {"start_s": started, "steps": found, "used_bytes": dict(watch.most), "tried": tried}
            note(known)
            for each in tries:
                tried.append(attempt(work, position, watch, each))
                if "error" in tried[-1]:
                    break  # the engine is left asleep
        return known


def attempt(work: RlWork, position: Position, watch: Watch, setting: str) -> dict[str, Any]:
    """One step with ``name=value``; running out of memory is a result too."""
    name, _, value = setting.partition("=")
    change(work, name, value)
    watch.most.clear()
    try:
        metrics = work.step(position).metrics
    except (torch.OutOfMemoryError, PosttuneError) as error:
        print(f"{setting}: out of memory in {LEDGER.failed}", flush=True)
        return {"setting": setting, "error": str(error)}
    most = max(watch.most.values(), default=0)
    print(f"{setting}: {most / 1e9:.1f} GB at most, {line(metrics)}", flush=True)
    return {"setting": setting, "step": metrics, "used_bytes": dict(watch.most)}


def change(work: RlWork, name: str, value: str) -> None:
    """Another setting for the steps to come: micro_batch_tokens, or gradient_checkpointing."""
    assert work.critic is not None
    if name == "micro_batch_tokens":
        packing = work.config.packing.model_copy(update={name: int(value)})
        work.config = work.config.model_copy(update={"packing": packing})
        work.updater.packing = work.critic.packing = packing
    elif name == "gradient_checkpointing":
        for model in (work.loaded.model, work.critic.loaded.model):
            if value == "true":
                prepare_model(model, ModelConfig(path="-", gradient_checkpointing=True), 0)
            else:
                model.gradient_checkpointing_disable()
    else:
        raise SystemExit(f"--try knows micro_batch_tokens and gradient_checkpointing, not {name!r}")


def cap(limit_gb: float, others_gb: float) -> None:
    """Let torch's allocator hold no more than a GPU of ``limit_gb`` would leave it."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((limit_gb - others_gb) * 1e9 / total)


def line(metrics: dict[str, float]) -> str:
    """A step in one line."""
    times = {name[5:-2]: value for name, value in metrics.items() if name.startswith("time/")}
    shown = ", ".join(f"{name} {value:.2f} s" for name, value in times.items())
    return f"{metrics['tokens_per_s']:.0f} tokens/s, grad_norm {metrics.get('grad_norm', 0):.3f}: {shown}"


def compare(plan: Any, used: dict[str, int]) -> None:
    """Plan and measured, GiB."""
    names = {"values": "critic", "hand over": "sync", "logprob": "update"}
    print(f"{'phase':>12} {'planned':>10} {'measured':>10}  GiB")
    for phase in plan.phases:
        seen = used.get(phase.name) or used.get(names.get(phase.name, ""), 0)
        print(f"{phase.name:>12} {phase.total / GIB:>10.1f} {seen / GIB:>10.1f}")
    print(f"{'most':>12} {plan.peak.total / GIB:>10.1f} {max(used.values(), default=0) / GIB:>10.1f}")


def record(options: argparse.Namespace, plan: Any, found: dict[str, Any]) -> dict[str, Any]:
    """The document, written where one is asked for."""
    document = {
        "recipe": options.recipe,
        "overrides": options.overrides,
        "most_gb": max(found["used_bytes"].values()) / 1e9,
        "tokens_per_s": found["steps"][-1]["tokens_per_s"],
        "planned_gb": {phase.name: phase.total / 1e9 for phase in plan.phases},
        **found,
    }
    if options.json:
        options.json.write_text(json.dumps(document) + "\n", encoding="utf-8")
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", help="such as rl.packing.micro_batch_tokens=4096")
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument(
        "--limit-gb", type=float, help="the most that may be used of the GPU, GB of 10^9 bytes"
    )
    parser.add_argument("--others-gb", type=float, default=3.0, help="of the limit, beside torch's allocator")
    parser.add_argument("--try", dest="tries", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--least", type=float, default=0.0, help="tokens a second of the last step at least")
    parser.add_argument("--json", type=Path)
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run = load(options.recipe, options.model, rows(folder, 2048, options.model), options.overrides)
        total = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
        (plan,) = plan_run(run, Setting(device_bytes=total, prompt_tokens=110))
        if options.limit_gb is not None:
            cap(options.limit_gb, options.others_gb)
        found = measure(run, folder, options.steps, options.tries, partial(record, options, plan))
    compare(plan, found["used_bytes"])
    document = record(options, plan, found)
    most, speed = document["most_gb"], document["tokens_per_s"]
    print(f"{most:.1f} GB at most, {speed:.0f} tokens/s")
    print(json.dumps(document))
    over = options.limit_gb is not None and most > options.limit_gb
    sys.exit(1 if over or speed < options.least else 0)


if __name__ == "__main__":
    main()
