"""Why an estimate has no verdict of its own; each is one line, and an exit status."""

from __future__ import annotations

from prefill_probe.faults import EX_CONFIG, EX_SOFTWARE, EX_TEMPFAIL, EX_UNAVAILABLE


class UntraceableError(BaseException):
    """An operator that needs values which a virtual GPU does not have, or that has no rule for shapes.

    Not an ``Exception``: neither the engine nor the probe may take it for a failure that they can handle, or the
    estimate would be of something else.

    Attributes:
        operator: its name.
    """

    exit_status = EX_TEMPFAIL

    def __init__(self, operator: str, why: str) -> None:
        super().__init__(f"inconclusive: operator {operator} cannot be traced: {why}")
        self.operator = operator


class ModelError(ValueError):
    """A model directory or a command line that cannot be read; the text says what is accepted."""

    exit_status = 2


class StartError(RuntimeError):
    """The engine does not start with this configuration on this card; the text is the engine's."""

    exit_status = EX_CONFIG


class StartFault(RuntimeError):
    """The engine's start fails on a virtual GPU, and not for lack of memory."""

    exit_status = EX_SOFTWARE


class MissingError(RuntimeError):
    """Something that the engine needs is not there, a package or a GPU; the text names it."""

    exit_status = EX_UNAVAILABLE
