"""The `slipstream` command: its subcommands, and errors as one line and an exit code.

Exit codes: 0 done; 1 an error that Slipstream names, or a closed stdout as in `| head`; 2 a bad option or a model that
cannot be used; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from slipstream import __version__
from slipstream.cli import audit, bench, chat, explain, generate, models, serve, train, tune
from slipstream.cli.help import Command, Group
from slipstream.cli.options import DebugOption, debug
from slipstream.cli.show import note
from slipstream.core.errors import ConfigError, DownloadError, ModelError, SlipstreamError

app = typer.Typer(
    name="slipstream",
    cls=Group,
    help="Runs a language model faster by guessing ahead, without changing a single token of its answer.",
    epilog='Try: slipstream generate "Write a haiku about wind"',
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate", cls=Command)(generate.generate)
app.command("chat", cls=Command)(chat.chat)
app.command("serve", cls=serve.ServeCommand)(serve.serve)
app.command("models", cls=Command)(models.models)
app.command("bench", cls=Command)(bench.bench)
app.command("audit", cls=Command)(audit.audit)
app.command("train", cls=Command)(train.train)
app.command("tune", cls=Command)(tune.tune_command)
app.command("explain", cls=Command)(explain.explain)


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"slipstream {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=print_version, is_eager=True)
    ] = False,
    debug: DebugOption = False,
) -> None:
    pass


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; always ends in SystemExit."""
    debug.wanted = False
    try:
        app(args=None if argv is None else list(argv), prog_name="slipstream")
    except SlipstreamError as error:
        if debug.wanted:
            raise
        note("error: " + " ".join(str(error).split()), style="bold red")
        bad_input = isinstance(error, ConfigError | ModelError) and not isinstance(error, DownloadError)
        sys.exit(2 if bad_input else 1)
    except (Exception, KeyboardInterrupt, SystemExit) as ended:  # typer turns Ctrl-C into SystemExit
        if not was_interrupted(ended):
            raise
        note("interrupted")
        sys.exit(130)


def was_interrupted(ended: BaseException | None) -> bool:
    """Whether Ctrl-C caused it. A lazy import that was interrupted raises ModuleNotFoundError, for instance."""
    if isinstance(ended, SystemExit):
        return ended.code == 130
    while ended is not None and not isinstance(ended, KeyboardInterrupt):
        ended = ended.__cause__ or ended.__context__
    return ended is not None
