from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_probe.systemd.unit_file import read_unit
from prefill_probe.systemd.units import DROP_IN, Deployment, engine_unit_name

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
ARGUMENT = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)))
ODD = ["--model", "/a b/100%n", "$HOME", "${HOME}", '"it\'s"', "\\x41", "", ";", "#", "\n", "\ufffe", "€"]


def place(folder: Path, deployment: Deployment) -> Path:
    """The units in ``folder``, beside a service of the engine."""
    for name, text in deployment.files().items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    engine = folder / f"{deployment.engine}.service"
    engine.write_text("[Service]\nExecStart=/bin/false\nRestart=always\n")
    return engine


def verify(folder: Path, file: Path, *options: str) -> str:
    environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(folder), "XDG_RUNTIME_DIR": str(folder)}
    command = ["systemd-analyze", *options, "verify", file]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    complaints = [line for line in (done.stdout + done.stderr).splitlines() if str(folder) in line or "engine" in line]
    return "\n".join(complaints) or ("" if done.returncode == 0 else done.stderr)


@needs_systemd
@pytest.mark.parametrize("check_first", [False, True])
@pytest.mark.parametrize("options", [(), ("--user",)])
def test_systemd_has_no_complaint(tmp_path: Path, check_first: bool, options: tuple[str, ...]) -> None:
    command = ("/bin/true", "serve", *ODD)
    run_as = "" if options else "root"
    deployment = Deployment("/bin/true", "engine", command, bool(options), check_first, run_as=run_as)
    engine = place(tmp_path, deployment)
    assert verify(tmp_path, engine, *options) == ""
    assert verify(tmp_path, tmp_path / "prefill-probe@.service", *options) == ""


@needs_systemd
def test_systemd_does_complain_of_what_is_wrong(tmp_path: Path) -> None:
    engine = place(tmp_path, Deployment("/bin/true", "engine"))
    with (tmp_path / "engine.service.d" / DROP_IN).open("a") as file:
        file.write("RestartPreventExit=78\n")
    assert "RestartPreventExit" in verify(tmp_path, engine)


def test_the_command_of_the_drop_in_is_the_one_that_is_checked(tmp_path: Path) -> None:
    engine = place(
        tmp_path, Deployment("/bin/true", "engine", ("/opt/a b/$x/100%/ft", "serve", *ODD), check_first=True)
    )
    assert read_unit(engine, {}).arguments == ["/opt/a b/$x/100%/ft", "serve", *ODD]
    (tmp_path / "engine.service.d" / DROP_IN).write_text(Deployment("/bin/true", "engine").drop_in())
    assert read_unit(engine, {}).arguments == ["/bin/false"]


@given(arguments=st.lists(ARGUMENT))
def test_any_command_survives(tmp_path_factory: pytest.TempPathFactory, arguments: list[str]) -> None:
    engine = place(tmp_path_factory.mktemp("units"), Deployment("/bin/true", "engine", ("/ft", "serve", *arguments)))
    assert read_unit(engine, {}).arguments == ["/ft", "serve", *arguments]


@pytest.mark.parametrize("program", ["ft", "/it's/ft", '/a"/ft', "/a\\b/ft", "/a\nb/ft"])
def test_a_program_that_systemd_does_not_take_is_refused(program: str) -> None:
    with pytest.raises(ValueError, match=r"systemd takes no program|is absolute"):
        Deployment("/bin/true", "engine", (program, "serve")).files()


@pytest.mark.parametrize("name", ["freetoken", "freetoken.service", "a@b", r"a\x2db", "a-b_c:1.2", "a@b@c.service"])
def test_names_of_services(name: str) -> None:
    assert engine_unit_name(name) == name.removesuffix(".service")


@pytest.mark.parametrize(
    "name", ["", "a b", "a/b", "../a", ".a", "a.socket", "a@", "a@.service", "@a", "é", "a%i", "x" * 230]
)
def test_what_is_no_name_of_a_service_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a service"):
        engine_unit_name(name)
