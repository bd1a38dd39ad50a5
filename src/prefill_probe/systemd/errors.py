"""What is wrong with a unit."""

from __future__ import annotations


class UnitError(ValueError):
    """A unit cannot be used; one line that names the file, the line and what is wrong."""
