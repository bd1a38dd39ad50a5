"""The command line."""

from __future__ import annotations


def main() -> None:
    """Entry point of ``prefill-probe``."""
    raise SystemExit(69)
