"""Python programs that start warm: forks of a process that has imported what FreeToken itself imports.

Of what such a program takes, imports of torch and transformers are most, and tests start dozens. The process that forks
knows nothing of FreeToken nor of this project: those are imported by the program, hook and all. What is said of a real
interpreter's start is tested with one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

MODULES = (
    "torch", "torch._dynamo", "torch.distributed", "triton", "transformers", "transformers.masking_utils",
    "transformers.generation.utils", "transformers.models.auto", "openai", "openai.types.chat", "fastapi", "uvicorn",
    "zmq", "partial_json_parser",
)  # fmt: skip


def run(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """``python *arguments`` (``-c CODE``, ``-m MODULE`` or a file, and its arguments), its output captured.

    Args:
        environment: the whole of it; this process's if None.
        timeout: in seconds.

    Raises:
        subprocess.TimeoutExpired: after ``timeout`` seconds; the program is gone.
    """
    environment = os.environ if environment is None else environment
    with tempfile.TemporaryDirectory() as directory:
        outputs = [Path(directory, name) for name in ("out", "err")]
        request = {"arguments": list(arguments), "environment": dict(environment), "outputs": list(map(str, outputs))}
        status = _process()._ask(json.dumps(request), timeout)
        if status is None:
            _process.cache_clear()
            raise subprocess.TimeoutExpired(list(arguments), timeout, *(path.read_bytes() for path in outputs))
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in outputs]
    return subprocess.CompletedProcess(list(arguments), status, *texts)


def cold(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """The same by a new interpreter, as a user starts it."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout, env=environment)


def document(program: Path, *arguments: str, **variables: str) -> dict[str, Any]:
    """The JSON document that ``program``, which finds what this process finds, prints last."""
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = run([str(program), *arguments], {**os.environ, "PYTHONPATH": paths, **variables}, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


class _Process:
    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        atexit.register(self._end)

    def _ask(self, request: str, timeout: float) -> int | None:
        """The program's exit status; None if it took too long."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.write(request + "\n")
        self._popen.stdin.flush()
        if not select.select([self._popen.stdout], [], [], timeout)[0]:
            self._end()
            return None
        return int(self._popen.stdout.readline())

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)


@functools.cache
def _process() -> _Process:
    return _Process()


def _serve() -> None:
    """Fork for every request, a line each, and answer with the exit status. Returns only in the forks."""
    for name in MODULES:
        with contextlib.suppress(ImportError):
            import_module(name)
    gc.collect()
    gc.freeze()
    path = sys.path[1:]  # without this file's own directory
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            _become(json.loads(line), path)
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.exit()


def _become(request: dict[str, list[str]], path: list[str]) -> None:
    """Be the process that an interpreter with these arguments would be at the start of its program."""
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[arg-type]
    null = os.open(os.devnull, os.O_RDONLY)
    opened = [os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in request["outputs"]]
    for target, source in enumerate([null, *opened]):
        os.dup2(source, target)
        os.close(source)
    arguments = request["arguments"]
    program = arguments[: 2 if arguments[0] in ("-c", "-m") else 1]
    first = "" if len(program) == 2 else str(Path(program[0]).parent)
    sys.path[:] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    sys.orig_argv = [sys.executable, *arguments]
    sys.argv = [program[0], *arguments[len(program) :]]
    sys.modules.pop("warm", None)


def _program() -> None:
    word, *rest = sys.orig_argv[1:]
    if word == "-c":
        del sys.modules["__main__"].__file__
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif word == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(word, run_name="__main__")


def _status_of(program: Callable[[], None]) -> int:
    """Run it as an interpreter would, to the exit status."""
    try:
        program()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    _serve()
    status = _status_of(_program)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # To take the imported modules apart would copy every page of them.
    os._exit(status & 0xFF)
