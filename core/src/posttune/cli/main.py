"""``posttune``: the table of commands, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence

import click

from posttune._version import __version__
from posttune.cli.failures import DISK, failure_of
from posttune.cli.lazy import LazyCommand, LazyGroup
from posttune.cli.output import emit_json, example
from posttune.errors import PosttuneError, UserError

COMMANDS = {
    "init": LazyCommand("posttune.cli.init_cmd:command", "Write a configuration to begin with."),
    "new": LazyCommand("posttune.cli.new_cmd:command", "Make a package for a plugin of your own."),
    "run": LazyCommand("posttune.cli.run_cmd:command", "Run the stages of a configuration."),
    "plan": LazyCommand("posttune.cli.plan_cmd:command", "Estimate the memory of a run before it runs."),
    "config": LazyCommand("posttune.cli.config_cmd:command", "Check, show or describe configurations."),
    "data": LazyCommand("posttune.cli.data_cmd:command", "Convert and inspect datasets."),
    "score": LazyCommand("posttune.cli.score_cmd:command", "Try rewards on saved answers."),
    "evaluate": LazyCommand("posttune.cli.evaluate_cmd:command", "Measure a model's accuracy."),
    "generate": LazyCommand("posttune.cli.generate_cmd:command", "Answer prompts with a model."),
    "export": LazyCommand("posttune.cli.export_cmd:command", "Write a Hugging Face folder."),
    "models": LazyCommand("posttune.cli.models_cmd:command", "Import models from other formats."),
    "plugins": LazyCommand("posttune.cli.plugins_cmd:command", "List and show plugins."),
    "doctor": LazyCommand("posttune.cli.doctor_cmd:command", "Examine the machine and the plugins."),
    "selftest": LazyCommand("posttune.cli.selftest_cmd:command", "Check the algorithms against gold values."),
    "version": LazyCommand("posttune.cli.version:command", "Show versions."),
}

INTERRUPTED = 130


@click.group(
    cls=LazyGroup,
    table=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=example("posttune run configs/quickstart.yaml", "posttune run --help"),
)
@click.version_option(__version__, "-V", "--version", prog_name="posttune")
def cli() -> None:
    """Post-train language models: SFT, reinforcement learning, export."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0, 1 failure, 2 the user's mistake, 130 interrupted.

    Under ``--json`` an error is one JSON document on stdout, beside its message on stderr.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    _speak_plainly()
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        code = cli.main(args=words, prog_name="posttune", standalone_mode=False)
    except (click.ClickException, click.Abort, PosttuneError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None:
            _answer(error, words)
            raise
        code = _explain(error)
        _answer(error, words)
        return code
    except Exception as error:
        _answer(error, words)
        raise
    return code if isinstance(code, int) else 0


def _explain(error: click.ClickException | click.Abort | PosttuneError | OSError) -> int:
    """Say on stderr what happened; the exit code."""
    if isinstance(error, click.ClickException):
        return _report_click(error)
    if isinstance(error, click.Abort):
        return _report("interrupted", INTERRUPTED)
    if isinstance(error, PosttuneError):
        return _report(str(error), error.exit_code)
    return _report(f"{error.filename}: {error.strerror}\n  next: {DISK}", _os_exit_code(error))


def _answer(error: Exception, words: Sequence[str]) -> None:
    """The document of an error, where one was asked for; of several processes the first speaks."""
    asked = "--json" in words[: words.index("--")] if "--" in words else "--json" in words
    if asked and os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(BrokenPipeError):
            emit_json({"error": failure_of(error)})


# torchao, which transformers imports where it is installed, tells of each kernel that it has no use for.
_CHATTY = ("torchao", "torch.utils._pytree")


class _Formatter(logging.Formatter):
    """``posttune: warning: …``, as errors are written."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return f"posttune: {record.levelname.lower()}: {record.message}"


def _speak_plainly() -> None:
    """Warnings go to stderr in our own form; what nobody can act on does not."""
    root = logging.getLogger()
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_Formatter())
        root.addHandler(handler)


def _report(message: str, code: int) -> int:
    if os.environ.get("POSTTUNE_TRACEBACK") == "1":
        traceback.print_exc()
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        sys.stderr.write(f"posttune: error: {message}\n")
    elif code != INTERRUPTED:  # all ranks stop together, and rank 0 says so
        sys.stderr.write(f"posttune: error: rank {rank}: {message}\n")
    return code


def _report_click(error: click.ClickException) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return error.exit_code
    context = error.ctx if isinstance(error, click.UsageError) else None
    fix = f"{context.command_path} --help" if context else ""
    return _report(str(UserError(error.format_message(), fix=fix)), error.exit_code)


def _os_exit_code(error: OSError) -> int:
    """A path that is missing, forbidden or of the wrong sort is the user's; a full disk is not."""
    user = FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError | FileExistsError
    return 2 if isinstance(error, user) else 1


if __name__ == "__main__":
    sys.exit(main())
