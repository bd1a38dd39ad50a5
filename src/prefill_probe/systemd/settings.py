"""The settings of a unit file, in order: sections, comments, continued lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prefill_probe.systemd.errors import UnitError


@dataclass(frozen=True)
class Setting:
    """One assignment, and where it stands."""

    section: str
    key: str
    value: str
    file: Path
    line: int

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """What is wrong inside is said of this setting.

        Raises:
            UnitError: for each ``ValueError``.
        """
        try:
            yield
        except ValueError as error:
            raise UnitError(f"{self.file}:{self.line}: {self.key}=: {error}") from None


def read_settings(file: Path) -> list[Setting]:
    """The settings of ``file``; the heading of a section is one without a key.

    Raises:
        UnitError: it cannot be read.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UnitError(f"{file}: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}") from None
    found: list[Setting] = []
    section, pending, first = "", "", 0
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        if line.lstrip().startswith(("#", ";")):
            continue
        first = first if pending else number
        pending += line.rstrip("\r")
        if _continued(pending):
            pending = pending[:-1] + " "
            continue
        whole, pending = pending.strip(), ""
        if heading := re.fullmatch(r"\[(.*)\]", whole):
            section = heading[1]
            found.append(Setting(section, "", "", file, first))
        elif "=" in whole:
            key, _, value = whole.partition("=")
            found.append(Setting(section, key.rstrip(), value.lstrip(), file, first))
    return found


def _continued(line: str) -> bool:
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1
