"""The command ``posttune-ray``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click
from posttune.errors import PosttuneError

from posttune_ray.launch import Wanted, launch

_MISTAKE = 2


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("config", type=click.Path())
@click.argument("overrides", nargs=-1)
@click.option("--nproc", type=click.IntRange(min=1), required=True, help="Processes on the whole cluster.")
@click.option("--gpus", type=click.FloatRange(min=0), default=0, help="GPUs of each process.")
@click.option("--cpus", type=click.FloatRange(min=0), default=1, help="CPU cores of each process.")
@click.option("--address", help="Of a cluster that runs; else $RAY_ADDRESS, else one is started here.")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint.")
def command(
    config: str,
    overrides: tuple[str, ...],
    nproc: int,
    gpus: float,
    cpus: float,
    address: str | None,
    resume: bool,
) -> None:
    """Run CONFIG as `posttune run` does, in processes of a Ray cluster.

    All nodes must see this folder under the same path, and have posttune and its plugins installed.
    """
    arguments = ["run", config, *overrides, *(["--resume"] if resume else [])]
    launch(arguments, Wanted(nproc, cpus, gpus, address))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; 0, 1 failure, 2 the user's mistake."""
    try:
        command.main(args=argv, prog_name="posttune-ray", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return _MISTAKE
    except click.Abort:
        return 130
    except PosttuneError as error:
        sys.stderr.write(f"posttune-ray: error: {error}\n")
        return error.exit_code
    return 0
