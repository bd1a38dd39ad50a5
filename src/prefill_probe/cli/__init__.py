"""The command line: parse, call, render, exit. A command is imported when it is used; ``--help`` imports none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import click

from prefill_probe import __version__

# Name -> what it does, in a line. Each is the function of that name in the module of that name.
_COMMANDS = {
    "check": "Try an engine command line on this machine's GPU.",
    "estimate": "Try an engine command line on a virtual GPU.",
    "hook": "Whether `ft serve` of this environment is probed.",
    "show": "Show the last record of this machine, or FILE.",
    "systemd": "A smoke test, and a drop-in for an engine's service.",
}


class _BadUsage(click.ClickException):
    """Bad usage in one line: the command, the argument, and what is accepted."""

    exit_code = 2

    def __init__(self, error: click.UsageError) -> None:
        path = error.ctx.command_path if error.ctx is not None else "prefill-probe"
        super().__init__(f"{path}: {' '.join(error.format_message().split())}")

    def show(self, file: Any = None) -> None:
        click.echo(self.message, file=file, err=file is None)


# From click 8.2 on a command without arguments shows its help this way.
_HELP: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())


class _Commands(click.Group):
    """The commands, by their table."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _in_one_line():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _in_one_line():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"{__name__}.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@contextlib.contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
    except _HELP:
        raise
    except click.UsageError as error:
        raise _BadUsage(error) from None


# A width that is given: to look for the terminal's costs an import that takes a tenth of --help.
@click.group(
    "prefill-probe", cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "terminal_width": 78}
)
@click.version_option(__version__)
def main() -> None:
    """Run one full prefill chunk before an LLM engine serves.

    Installed beside FreeToken, every `ft serve` is probed by itself; these commands show what was found.

    \b
    Example:
      ft serve --model MODEL
      prefill-probe show
    """
