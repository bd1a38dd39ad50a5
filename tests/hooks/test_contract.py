"""Every name and signature that the hook uses, against the published wheels of every version that was read."""

from __future__ import annotations

import ast
import zipfile
from pathlib import Path

import pytest

from engine_hooks.freetoken import routers, versions

WHEELS = Path(__file__).resolve().parents[2] / ".wheels"
FREE_LISTS = ("free_slots", "_swa_free")
CONTRACT = versions.CONTRACT | versions.SERVER_CONTRACT


class Wheel:
    """The Python sources of one wheel, parsed when asked for."""

    def __init__(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path)
        self._names = set(self._archive.namelist())

    def tree(self, module: str) -> ast.Module | None:
        base = module.replace(".", "/")
        for name in (f"{base}.py", f"{base}/__init__.py"):
            if name in self._names:
                return ast.parse(self._archive.read(name))
        return None

    def find(self, module: str, qualified: str) -> ast.AST | None:
        """The definition of a name, also one that the module only imports from a sibling."""
        tree = self.tree(module)
        if tree is None:
            return None
        node: ast.AST | None = tree
        for part in qualified.split("."):
            node = self._member(module, node, part)
            if node is None:
                return None
        return node

    def _member(self, module: str, scope: ast.AST | None, name: str) -> ast.AST | None:
        for node in getattr(scope, "body", []):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)) and node.name == name:
                return node
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    return node
            if isinstance(node, (ast.Import, ast.ImportFrom)) and any(
                (alias.asname or alias.name) == name for alias in node.names
            ):
                if isinstance(node, ast.Import) or not node.level:
                    return node
                package = module if self.is_package(module) else module.rpartition(".")[0]
                for _ in range(node.level - 1):
                    package = package.rpartition(".")[0]
                home = f"{package}.{node.module}" if node.module else package
                return self.find(home, next(a.name for a in node.names if (a.asname or a.name) == name))
        return None

    def is_package(self, module: str) -> bool:
        return f"{module.replace('.', '/')}/__init__.py" in self._names

    def models(self) -> list[str]:
        """The files of its model families."""
        return sorted(name for name in self._names if name.startswith("freetoken/models/") and name.endswith(".py"))

    def read(self, name: str) -> str:
        return self._archive.read(name).decode()

    def source(self) -> str:
        """Everything of the package's core, for attributes that are set in methods."""
        parts = [
            self._archive.read(name).decode()
            for name in sorted(self._names)
            if name.endswith(".py") and name.split("/")[1] in ("scheduler", "engine", "kvcache", "llm")
        ]
        return "\n".join(parts)


def wheel_of(version: str) -> Wheel:
    found = sorted(WHEELS.glob(f"freetoken-{version}-*.whl"))
    if not found:
        pytest.skip(f"the wheel of FreeToken {version} is not in {WHEELS.name}/ (the index could not be reached)")
    return Wheel(found[0])


@pytest.fixture(params=versions.READ_VERSIONS)
def wheel(request: pytest.FixtureRequest) -> Wheel:
    return wheel_of(request.param)


def test_every_name_and_signature_of_the_contract_is_in_every_version(wheel: Wheel) -> None:
    lacking = []
    for module, members in CONTRACT.items():
        for qualified, parameters in members.items():
            node = wheel.find(module, qualified)
            if node is None:
                lacking.append(f"{module}.{qualified}")
            elif parameters is not None:
                assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)), qualified
                arguments = node.args
                names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
                names = [name for name in names if name not in ("self", "cls")]
                if not versions.keeps(names, parameters):
                    lacking.append(f"{module}.{qualified}{tuple(names)} is not {parameters}")
    assert lacking == []


def test_every_attribute_that_is_read_is_set_somewhere_in_every_version(wheel: Wheel) -> None:
    source = wheel.source()
    names = {name for group in versions.ATTRIBUTES.values() for name in group}
    lacking = [name for name in sorted(names) if f".{name} " not in source and f" {name}:" not in source]
    lacking = [name for name in lacking if f".{name}:" not in source and f" {name} = " not in source]
    assert lacking == []


def test_where_the_probe_belongs_is_as_it_was_read(wheel: Wheel) -> None:
    """A rank's boot error reaches the parent as ("error", "TypeName: text"); SIGTERM follows a worker's death."""
    launch = wheel.tree("freetoken.server.launch")
    assert launch is not None
    text = ast.unparse(launch)
    assert "f'{type(exc).__name__}: {exc}'" in text
    assert "scheduler = Scheduler(args)" in text
    assert "from .api_server import run_api_server" in text
    assert "from .args import parse_args" in text
    death = wheel.find("freetoken.server.api_server", "_exit_after_backend_death")
    assert death is not None
    assert "signal.SIGTERM" in ast.unparse(death)


def test_the_free_lists_are_replaced_and_never_edited_in_place(wheel: Wheel) -> None:
    """``state.Before`` keeps the tensor of a free list and puts it back: that is enough only if nobody writes to it."""
    edits = []
    for module in ("scheduler.cache", "kvcache.hybrid_swa_pool"):
        tree = wheel.tree(f"freetoken.{module}")
        assert tree is not None
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if isinstance(target, ast.Subscript) and ast.unparse(target.value).endswith(
                    ("free_slots", "_swa_free")
                ):
                    edits.append(ast.unparse(node))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_"):
                owner = ast.unparse(node.func.value)
                if owner.endswith(FREE_LISTS):
                    edits.append(ast.unparse(node))
    assert edits == []


def test_what_chooses_beside_experts_is_a_gate_or_a_router(wheel: Wheel) -> None:
    """``routers`` finds routers by these names, of every family."""
    others, found = [], 0
    for name in wheel.models():
        for node in ast.walk(ast.parse(wheel.read(name))):
            if not isinstance(node, ast.ClassDef):
                continue
            set_here = {
                target.attr
                for each in ast.walk(node)
                if isinstance(each, ast.Assign)
                for target in each.targets
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
            }
            found += "experts" in set_here
            if "experts" in set_here and not set_here & set(routers._ROUTERS):
                others.append(f"{name}: {node.name}")
    assert others == []
    assert found >= 9


def test_dummy_weights_are_as_the_routers_were_read(wheel: Wheel) -> None:
    made = wheel.find("freetoken.engine.engine", "_make_dummy_weight_state_dict")
    assert made is not None
    text = ast.unparse(made)
    assert "torch.randn(param.shape, dtype=param.dtype, device=device)" in text
    assert "torch.zeros(param.shape, dtype=param.dtype, device=device)" in text
    assert f"self.{routers._TABLE} = " in wheel.read("freetoken/models/deepseek_v4/moe.py")
