from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_probe.systemd.errors import UnitError
from prefill_probe.systemd.unit_file import EngineUnit, read_unit
from prefill_probe.systemd.words import quote_word

ARGUMENT = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)))


def unit(folder: Path, text: str, name: str = "engine.service") -> EngineUnit:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return read_unit(file, {})


def refused(folder: Path, text: str) -> str:
    with pytest.raises(UnitError) as caught:
        unit(folder, text)
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith(str(folder))
    return said.removeprefix(str(folder / "engine.service"))


def test_a_command_over_lines_with_comments_between(tmp_path: Path) -> None:
    read = unit(
        tmp_path,
        "# a comment\n[Unit]\nExecStart=/not/this\n\n[Service]\n"
        "ExecStart = /opt/ft serve \\\n  # not this\n  ; nor this\n  --model '/a b' \\\n\t--port 1\n"
        "WorkingDirectory=-/srv\n[Install]\nExecStart=/nor/this\n",
    )
    assert read == EngineUnit(["/opt/ft", "serve", "--model", "/a b", "--port", "1"], {}, Path("/srv"))


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("-/ft serve", ["/ft", "serve"]),
        ("@/ft called serve", ["/ft", "serve"]),
        ("!!/ft serve", ["/ft", "serve"]),
        ("+-/ft $A", ["/ft", "1", "2"]),
        ("-:/ft $A ${A}", ["/ft", "$A", "${A}"]),
        ("/ft 100%% %p %i %I %N", ["/ft", "100%", "engine", r"a\x20b-c", "a b/c", r"engine@a\x20b-c"]),
    ],
)
def test_prefixes_variables_and_specifiers(tmp_path: Path, command: str, arguments: list[str]) -> None:
    text = f"[Service]\nEnvironment='A=1 2'\nExecStart={command}\n"
    assert unit(tmp_path, text, r"engine@a\x20b-c.service").arguments == arguments


def test_an_empty_assignment_empties_a_list_and_drop_ins_come_after_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "engine.service.d"
    folder.mkdir()
    (folder / "20-b.conf").write_text("[Service]\nExecStart=/ft serve b\nEnvironment=A=3\n")
    (folder / "10-a.conf").write_text("[Service]\nExecStart=\nExecStart=/ft serve a\nExecStart=\nEnvironment=\n")
    (folder / "30-c.txt").write_text("[Service]\nExecStart=/ft serve c\n")
    read = unit(
        tmp_path, "[Service]\nExecStart=/ft serve\nEnvironment=A=1 B=2\nWorkingDirectory=/x\nWorkingDirectory=\n"
    )
    assert read == EngineUnit(["/ft", "serve", "b"], {"A": "3"}, None)


def test_an_environment_file_wins_and_may_be_missing_if_it_is_marked(tmp_path: Path) -> None:
    (tmp_path / "env").write_text("A='from a file'\n")
    head = f'[Service]\nExecStart=/ft $A\nEnvironmentFile={tmp_path}/env\nEnvironment=A=1 "B=2 3"\n'
    read = unit(tmp_path, f"{head}EnvironmentFile=-{tmp_path}/none\n")
    assert read == EngineUnit(["/ft", "from", "a", "file"], {"A": "from a file", "B": "2 3"}, None)
    assert f"{tmp_path}/none: No such file" in refused(tmp_path, f"{head}EnvironmentFile={tmp_path}/none\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[Unit]\nDescription=x\n", ": it has no [Service] section"),
        ("[Service]\nType=simple\n", ": it has no ExecStart="),
        ("[Service]\nExecStart=/ft\nExecStart=\n", ": it has no ExecStart="),
        ("[Service]\nExecStart=/ft\nExecStart=/ft\n", ":3: ExecStart=: a second command"),
        ("[Service]\nExecStart=/ft \\\n a ; /ft b\n", ":2: ExecStart=: a second command"),
        ("[Service]\nExecStart=/ft 'a\n", ":2: ExecStart=: the quote ' is not closed"),
        ("[Service]\nExecStart=/ft %b\n", ":2: ExecStart=: the specifier %b cannot be resolved"),
        ("[Service]\nExecStart=/ft %i\n", ":2: ExecStart=: the specifier %i cannot be resolved"),
        ("[Service]\nExecStart=/ft 5%\n", ":2: ExecStart=: the specifier % cannot be resolved"),
        ("[Service]\nExecStart=/ft ${HOME}/m\n", ":2: ExecStart=: ${HOME} is set by systemd"),
        ("[Service]\nExecStart=-\n", ":2: ExecStart=: no program"),
        ("[Service]\nExecStart=/ft\nEnvironment=A=\\q\n", ":3: Environment=: \\q is no escape"),
        ("[Service]\nExecStart=/ft\nEnvironmentFile=env\n", ":3: EnvironmentFile=: env is not an absolute path"),
        ("[Service]\nExecStart=/ft\nWorkingDirectory=here\n", ":3: WorkingDirectory=: here is not an absolute path"),
    ],
)
def test_what_is_wrong_is_one_line_with_file_and_line(tmp_path: Path, text: str, said: str) -> None:
    assert refused(tmp_path, text).startswith(said)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.service").write_bytes(b"[Service]\nExecStart=/ft \xe9\n")
    for name, why in (
        ("none.service", "no such file"),
        ("latin.service", "not UTF-8"),
        ("", "no such file"),
        ("x" * 300, "too long"),
    ):
        with pytest.raises(UnitError, match=why):
            read_unit(tmp_path / name, {})


def test_a_name_is_looked_up_in_the_directories_of_systemd(tmp_path: Path) -> None:
    home, runtime = tmp_path / "config/systemd/user", tmp_path / "run/systemd/user"
    for folder in (home, runtime / "far-engine.service.d", home / "far-.service.d"):
        folder.mkdir(parents=True)
    environ = {
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_RUNTIME_DIR": str(tmp_path / "run"),
    }
    (runtime / "far-engine.service").write_text("[Service]\nExecStart=/ft %u %t %E $A\n")
    (runtime / "far-engine.service.d/a.conf").write_text("[Service]\nEnvironment=A=1\n")
    (home / "far-.service.d/b.conf").write_text("[Service]\nEnvironment=A=2\n")
    own = pwd.getpwuid(os.getuid()).pw_name
    arguments = ["/ft", own, str(tmp_path / "run"), str(tmp_path / "config"), "2"]
    for name in ("far-engine", "far-engine.service", str(runtime / "far-engine.service")):
        assert read_unit(Path(name), environ).arguments == arguments
    with pytest.raises(UnitError, match=r"^near\.service: no unit of this name in /etc/systemd/system"):
        read_unit(Path("near"), environ)


def test_an_instance_is_read_from_its_template(tmp_path: Path) -> None:
    folder = tmp_path / ".config/systemd/user"
    (folder / "engine@.service.d").mkdir(parents=True)
    (folder / "engine@.service").write_text("[Service]\nExecStart=/ft --model %i $A\n")
    (folder / "engine@.service.d/a.conf").write_text("[Service]\nEnvironment=A=1\n")
    assert read_unit(Path("engine@large"), {"HOME": str(tmp_path)}).arguments == ["/ft", "--model", "large", "1"]


@given(arguments=st.lists(ARGUMENT))
def test_a_quoted_command_is_read_back(tmp_path_factory: pytest.TempPathFactory, arguments: list[str]) -> None:
    folder = tmp_path_factory.mktemp("unit")
    line = " ".join(map(quote_word, ["/ft", *arguments]))
    assert unit(folder, f"[Service]\nExecStart={line}\n").arguments == ["/ft", *arguments]
