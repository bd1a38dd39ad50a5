"""The units that this package writes: a smoke test, and a drop-in for an engine's service."""

from __future__ import annotations

import re
from dataclasses import dataclass

from prefill_probe.systemd.manager import NAME
from prefill_probe.systemd.words import quote_word

SMOKE_TEST = "prefill-probe@.service"
DROP_IN = "50-prefill-probe.conf"
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def engine_unit_name(text: str) -> str:
    """The name of a service, without ``.service``.

    Raises:
        ValueError: systemd has no service of such a name.
    """
    name = text.removesuffix(".service")
    if not NAME.fullmatch(name) or len(name) > 220 or name.startswith((".", "@")) or name.endswith((".d", "@")):
        raise ValueError(f"{text!r} is not the name of a service, such as freetoken or freetoken@large.service")
    if re.search(r"\.(socket|target|timer|mount|path|slice|scope|device|swap|automount)$", name):
        raise ValueError(f"{text!r} is not a service")
    return name


@dataclass(frozen=True)
class Deployment:
    """What the units are about.

    Attributes:
        program: the path of ``prefill-probe``.
        engine: the engine's service, without ``.service``.
        command: the engine's command line; empty leaves the one that its unit has.
        user: units for a user's manager.
        check_first: check the configuration before each start of the engine as well.
        start_seconds: how long a model load and a probe may take.
        run_as: the user of the smoke test; empty is the manager's.
    """

    program: str
    engine: str
    command: tuple[str, ...] = ()
    user: bool = False
    check_first: bool = False
    start_seconds: int = 1800
    run_as: str = ""

    def __post_init__(self) -> None:
        if self.run_as and not _USER.fullmatch(self.run_as):
            raise ValueError(f"--run-as {self.run_as!r}: not the name of a user")

    def files(self) -> dict[str, str]:
        """The text of each file, by its path below the manager's directory of units.

        Raises:
            ValueError: a word that cannot be written in a unit.
        """
        return {SMOKE_TEST: self.smoke_test(), f"{self.engine}.service.d/{DROP_IN}": self.drop_in()}

    def smoke_test(self) -> str:
        """A oneshot that checks what the service that its instance names would start, drop-ins included."""
        run_as = f"User={self.run_as}\n" if self.run_as else ""
        return f"""\
# systemctl start prefill-probe@NAME checks what NAME.service would start, on this machine's GPU.
[Unit]
Description=Run a full prefill chunk of %i before it is deployed
Before=%i.service

[Service]
Type=oneshot
ExecStart={_line(self.program, "check")} --unit %i.service
{run_as}TimeoutStartSec={self.start_seconds}
# Not that of the engine, which may belong to another user.
StateDirectory=prefill-probe-check/%i
{self._sandbox()}"""

    def drop_in(self) -> str:
        """What an engine's service is to have beside its own settings."""
        unit = check = command = ""
        if self.check_first:
            unit = f"""\
[Unit]
# RestartPreventExitStatus= does not look at ExecStartPre=: a check that fails is restarted, so starts are counted.
StartLimitIntervalSec={4 * self.start_seconds}
StartLimitBurst=3

"""
            check = f"ExecStartPre={_line(self.program, 'check')} --unit %n\n"
        if self.command:
            command = f"ExecStart=\nExecStart={_line(*self.command)}\n"
        return f"""\
# What prefill-probe adds to this service.
{unit}[Service]
{command}{check}\
# 78: does not fit. 70: a fault, which may cost the GPU again. 2: bad usage. A restart mends none of them.
# 69 is not here: a driver that is not up yet comes up.
RestartPreventExitStatus=2 70 78
# 75: free memory moved under the probe. Try again, whatever Restart= says, and not at once.
RestartForceExitStatus=75
RestartSec=10
# Bounds ExecStartPre=, and the start of a service with Type=notify.
TimeoutStartSec={self.start_seconds}
# Where the record is kept.
StateDirectory=prefill-probe/%N
{self._sandbox()}"""

    def _sandbox(self) -> str:
        """Only what a CUDA process stands; docs/systemd.md says why the others are not here."""
        # A user's manager may not make the mount namespaces that these need.
        mounts = "" if self.user else "ProtectSystem=full\nProtectKernelTunables=yes\nProtectControlGroups=yes\n"
        return f"""\
# Left out, for a CUDA process or its caches do not stand them: MemoryDenyWriteExecute=, PrivateDevices=,
# DevicePolicy=, ProtectClock=, ProtectHome=, PrivateTmp=, ProcSubset=, PrivateUsers=.
NoNewPrivileges=yes
RestrictSUIDSGID=yes
LockPersonality=yes
{mounts}"""


def _line(program: str, *arguments: str) -> str:
    """A command line.

    Raises:
        ValueError: systemd takes no program with such a path, or no such argument.
    """
    if not program.startswith("/"):
        raise ValueError(f"{program!r}: the path of a program in a unit is absolute")
    if re.search(r"""['"\\\x00-\x1f\x7f]""", program):
        raise ValueError(f"{program!r}: systemd takes no program with a quote, a backslash or a line break in its path")
    # Variables are not replaced in a program's path, so a dollar sign stands for itself.
    words = [quote_word(program).replace("$$", "$"), *map(quote_word, arguments)]
    return " ".join(words)
