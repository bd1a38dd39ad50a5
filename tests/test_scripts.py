"""The scripts beside one another: what one takes from another is there, also where a function takes it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
PROGRAMS = sorted(
    path
    for path in [*SCRIPTS.glob("**/*"), *Path(__file__).parent.glob("**/*.py")]
    if path.is_file() and (path.suffix == ".py" or path.read_bytes()[:80].startswith(b"#!/usr/bin/env python"))
)


def names_of(module: Path) -> set[str]:
    """What a module binds at its top level."""
    found: set[str] = set()
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update((alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update(name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
    return found


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: str(path.relative_to(SCRIPTS.parent)))
def test_what_a_script_takes_from_another_is_there(program: Path) -> None:
    for node in ast.walk(ast.parse(program.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            module = SCRIPTS / f"{node.module.replace('.', '/')}.py"
            if module.exists():
                assert {alias.name for alias in node.names} <= names_of(module), f"line {node.lineno}"
