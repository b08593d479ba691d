"""``posttune plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from posttune.cli.config_cmd import OVERRIDES
from posttune.cli.output import emit_json, example, json_option, only_json, print_table

if TYPE_CHECKING:
    from posttune.plan.estimate import StagePlan

GIB = 2**30


@click.command(
    "plan",
    epilog=example(
        "posttune plan run.yaml",
        "posttune plan run.yaml --gpus 4 --memory 80 parallel.data_shard=-1",
        "posttune plan run.yaml rl.optimizer.name=torchao_adamw_8bit --json",
    ),
)
@click.argument("config")
@OVERRIDES
@click.option(
    "--gpus", type=click.IntRange(min=1), default=1, show_default=True, help="Processes, a GPU each."
)
@click.option(
    "--memory", type=click.FloatRange(min=0, min_open=True), help="Of one GPU, GiB; says whether it fits."
)
@click.option("--prompt-tokens", type=click.IntRange(min=1), help="Of the longest prompt.")
@json_option
def command(
    config: str,
    overrides: tuple[str, ...],
    gpus: int,
    memory: float | None,
    prompt_tokens: int | None,
    as_json: bool,
) -> None:
    """Estimate the memory that each phase of CONFIG will take, before anything runs.

    Of the models only config.json is read, and no plugin is loaded: an engine need not be installed here.
    Not counted: what CUDA itself takes, about 0.5 GiB, what an engine keeps while it sleeps, about 2 GiB,
    and what the allocator cannot use.
    """
    from posttune.config.load import load_config
    from posttune.plan.estimate import Setting, plan_run

    setting = Setting(gpus, None if memory is None else int(memory * GIB), prompt_tokens)
    with only_json(as_json):
        plans = plan_run(load_config(config, overrides).config, setting)
    if as_json:
        emit_json(
            {"gpus": gpus, "stages": {each.stage: document(each, setting.device_bytes) for each in plans}}
        )
        return
    for each in plans:
        _show(each, setting.device_bytes)


def document(plan: StagePlan, device: int | None) -> dict[str, Any]:
    """A stage's plan as JSON data, in bytes."""
    return {
        "phases": {phase.name: {**phase.parts, "total": phase.total} for phase in plan.phases},
        "peak": {"phase": plan.peak.name, "bytes": plan.peak.total},
        "host_bytes": plan.host,
        "fits": None if device is None else plan.peak.total <= device,
        "assumed": plan.assumed,
    }


def _show(plan: StagePlan, device: int | None) -> None:
    names = list(dict.fromkeys(name for phase in plan.phases for name in phase.parts))
    rows = [[name, *(_gib(phase.parts.get(name)) for phase in plan.phases)] for name in names]
    rows.append(["total", *(_gib(phase.total) for phase in plan.phases)])
    print_table(["GiB on each GPU", *(phase.name for phase in plan.phases)], rows, title=plan.stage)
    peak = plan.peak
    click.echo(f"most in {peak.name}: {peak.total / GIB:.2f} GiB; on the host {plan.host / GIB:.2f} GiB")
    if device is not None:
        fits = "fits" if peak.total <= device else "does not fit"
        click.echo(f"{fits} in {device / GIB:.1f} GiB")
    for text in plan.assumed:
        click.echo(f"assumed: {text}")


def _gib(count: int | None) -> str:
    return "" if not count else f"{count / GIB:.2f}" if count >= GIB / 100 else f"{count / GIB:.4f}"
