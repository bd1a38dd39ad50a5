"""The probe's flags on ``ft serve``, and how they reach the ranks.

The engine's parser is built inside ``parse_args``, so the flags are added to it the moment it parses. Values are
checked there, before any weight is read, and handed on as environment variables, which spawned ranks inherit.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from prefill_probe.settings import OPTIONS


def parse_with_probe(module: Any, parse_args: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``parse_args`` of ``freetoken.server.args`` (the module), with the probe's flags."""
    genuine = module.argparse
    module.argparse = _Argparse(genuine)
    try:
        return parse_args(*args, **kwargs)
    finally:
        module.argparse = genuine


class _Argparse:
    """argparse as the engine's module sees it while it parses: only the parser class is another one."""

    ArgumentParser: type[argparse.ArgumentParser]

    def __init__(self, genuine: Any) -> None:
        self._genuine = genuine
        self.ArgumentParser = _Parser

    def __getattr__(self, name: str) -> Any:
        return getattr(self._genuine, name)


class _Parser(argparse.ArgumentParser):
    """The engine's parser, with one more group of flags."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        _add_flags(self)
        parsed = super().parse_args(args, namespace)
        _export(self, parsed)
        return parsed


def _dest(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _checked(parse: Callable[[str], Any]) -> Callable[[str], str]:
    """The text itself, once ``parse`` has accepted it: what is exported is what was typed."""

    def check(text: str) -> str:
        try:
            parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return check


def _add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "prefill probe", "One full prefill chunk is run before the server answers (package prefill-probe)."
    )
    for option in OPTIONS:
        group.add_argument(
            option.flag,
            dest=_dest(option.flag),
            type=_checked(option.parse),
            metavar=option.metavar,
            help=f"{option.help} Default: {option.default} (environment: {option.variable}).".replace("%", "%%"),
        )


def _export(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """Take the probe's values out of the namespace (the engine refuses names it does not know) and export them.

    A flag wins over its environment variable; a variable's value is checked even so when no flag is given.
    """
    for option in OPTIONS:
        text = vars(parsed).pop(_dest(option.flag))
        if text is not None:
            os.environ[option.variable] = text
        else:
            _check_environment(parser, option.variable, option.parse)


def _check_environment(parser: argparse.ArgumentParser, variable: str, parse: Callable[[str], Any]) -> None:
    if text := os.environ.get(variable):
        try:
            parse(text)
        except ValueError as error:
            parser.error(f"environment variable {variable}: {error}")
