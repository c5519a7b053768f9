"""Environments from the wheel: the whole way with real pip and uv, and a folder of made packages for an index."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from verl_multiturn import install

pytestmark = pytest.mark.slow

NAME = "cpu" if sys.version_info[:2] == (3, 11) else "gpu"
"""The environment that this Python can make."""
OPTIONS = [] if NAME == "cpu" else ["--without-flash-attn"]
UV = Path(sys.executable).with_name("uv")


def make_wheel(folder: Path, name: str, version: str, files: Mapping[str, bytes]) -> None:
    """Write a wheel of these files, with the dist-info that pip and uv need."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    kind = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    whole = {**files, f"{info}/METADATA": metadata.encode(), f"{info}/WHEEL": kind.encode()}
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, content in whole.items():
            entry = zipfile.ZipInfo(path)
            entry.external_attr = 0o100755 << 16
            archive.writestr(entry, content)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*whole, f"{info}/RECORD"]))


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with wheels: uv, and a package in two versions."""
    folder = tmp_path_factory.mktemp("packages")
    version = subprocess.run([UV, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    make_wheel(folder, "uv", version, {f"uv-{version}.data/scripts/uv": UV.read_bytes()})
    for each in ("1.0", "1.1"):
        make_wheel(folder, "tiny", each, {"tiny.py": f"version = {each!r}\n".encode()})
    return folder


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder of installed packages in which this package lies as its wheel puts it, with made locks."""
    site = tmp_path / "site"
    info = "verl_multiturn-0.1.0.dist-info"
    locks = dict.fromkeys((NAME, "tasks"), "tiny==1.0\n")
    locks["uv"] = (install.LOCKS / "uv.lock").read_text()
    files = {
        "verl_multiturn/__init__.py": "",
        "verl_multiturn/install.py": Path(install.__file__).read_text(),
        **{f"verl_multiturn/shipped/requirements/{name}.lock": text for name, text in locks.items()},
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: verl-multiturn\nVersion: 0.1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD", f"{info}/INSTALLER"])
    files[f"{info}/INSTALLER"] = "pip\n"
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    return site


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment with this one's pip: Python takes seconds to install its own."""
    folder = tmp_path_factory.mktemp("template") / "venv"
    subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", str(folder)], check=True)
    into = next(folder.glob("lib/python3*/site-packages"))
    for each in Path(str(distribution("pip").locate_file(""))).glob("pip*"):
        if each.name == "pip" or each.name.endswith(".dist-info"):
            shutil.copytree(each, into / each.name)
    return folder


@pytest.fixture
def fast(template: Path, tmp_path: Path) -> list[str]:
    """Return options with a Python that copies the template and uv in the place of making an environment."""
    return ["--python", copying(template, tmp_path, f'cp -l {UV} "$4/bin/uv" || cp {UV} "$4/bin/uv"')]


def copying(template: Path, folder: Path, further: str = "true") -> str:
    """Write a program that is taken for a Python and makes environments by copying one; return its path."""
    program = folder / "python"
    about = f"echo 3 {sys.version_info[1]} True $0"
    program.write_text(f"""#!/bin/sh
if [ "$2" = -c ]; then {about}; else cp -a {template}/. "$4" && {further}; fi
""")
    program.chmod(0o755)
    return str(program)


def variables(packages: Path, **further: str) -> dict[str, str]:
    """Return variables with which packages come from a folder alone, with a cache of its own."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "UV_", "PYTHON"))}
    own = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(packages)}
    return {**kept, **own, "UV_CACHE_DIR": str(packages / "cache"), **further}


def run(site: Path, *words: str, env: Mapping[str, str], cwd: Path, python: str = sys.executable) -> tuple[int, str]:
    """Run the file as a script; return the exit status and its messages."""
    command = [python, str(site / "verl_multiturn" / "install.py"), *words, *OPTIONS]
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False, timeout=550)
    return done.returncode, done.stderr


def made(site: Path, *words: str, **how: Any) -> bool:
    status, said = run(site, *words, **how)
    assert status == 0, said
    return True


def version_in(environment: Path) -> str:
    """Return the version of the package in an environment, which must have this package, too."""
    program = "import tiny, verl_multiturn; print(tiny.version, verl_multiturn.__file__)"
    # Both versions have one size. Written in one second, they would have one cached bytecode (-B: none is written).
    ran = subprocess.run(
        [environment / "bin" / "python", "-I", "-B", "-c", program], capture_output=True, text=True, check=True
    )
    version, place = ran.stdout.split(maxsplit=1)
    assert place.startswith(str(environment.resolve()))
    return version


def lock(site: Path, text: str) -> None:
    (site / "verl_multiturn" / "shipped" / "requirements" / f"{NAME}.lock").write_text(text)


def test_an_environment_is_made_kept_and_made_again(
    site: Path, packages: Path, tmp_path: Path, template: Path, fast: list[str]
) -> None:
    """Install uv with real pip and the rest with real uv; `test_environments.py` has Python make an environment."""
    env, place = variables(packages), tmp_path / "a folder" / "env"
    (tmp_path / "a folder").mkdir()
    assert made(site, NAME, "env", "--python", copying(template, place.parent), env=env, cwd=place.parent)
    assert version_in(place) == "1.0"
    assert (place / ".stamp").read_text().startswith(f"{NAME} ")
    assert not (place / ".unfinished").exists()
    packed = place / "share" / "verl_multiturn-0.1.0-py3-none-any.whl"
    assert set(zipfile.ZipFile(packed).namelist()) == {
        str(path.relative_to(site)) for path in site.rglob("*") if path.is_file() and path.name != "INSTALLER"
    }
    # Nothing is installed again, not even with an index that is gone.
    assert run(site, NAME, ".", env={**env, "PIP_FIND_LINKS": "/gone"}, cwd=place) == (0, "")
    assert made(site, NAME, str(place), "--with", "tasks", env=env, cwd=tmp_path)
    assert (place / ".tasks").read_text() == "tiny==1.0\n"

    lock(site, "tiny==1.1\n")
    (place / "mine").touch()
    status, said = run(site, NAME, str(place), env=env, cwd=tmp_path)
    assert status == 2
    assert said.endswith("is not empty; name a new folder, or remove it: it has other versions. --repair installs over "
                         "them, --anew removes them\n")  # fmt: skip
    assert version_in(place) == "1.0"
    assert made(site, NAME, str(place), "--repair", env=env, cwd=tmp_path)
    assert version_in(place) == "1.1"
    assert (place / "mine").exists()
    # Its own copy makes it again, from the folder that is emptied meanwhile.
    shutil.copy(site / "verl_multiturn/shipped/requirements/tasks.lock", place / ".stamp")
    within = next(place.glob("lib/python3*/site-packages"))
    words = [NAME, ".", "--anew", *fast]
    status, said = run(within, *words, env=env, cwd=place, python=str(place / "bin" / "python"))
    assert status == 0, said
    assert version_in(place) == "1.1"
    assert not (place / "mine").exists()


def test_what_was_not_made_to_its_end_is_not_taken_for_finished(
    site: Path, packages: Path, tmp_path: Path, fast: list[str]
) -> None:
    """The installer is killed while uv waits for an index; uv goes on, and a second run waits for its end."""
    place = tmp_path / "env"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        slow = variables(packages, UV_DEFAULT_INDEX=index, UV_HTTP_RETRIES="0", NO_PROXY="127.0.0.1")
        del slow["PIP_NO_INDEX"], slow["PIP_FIND_LINKS"]
        command = [sys.executable, str(site / "verl_multiturn" / "install.py"), NAME, str(place), *fast, *OPTIONS]
        first = subprocess.Popen(command, env=slow, cwd=tmp_path, stderr=subprocess.DEVNULL)
        connection, _ = silent.accept()
        first.kill()
        first.wait()
        assert (place / ".unfinished").read_text() == "made"
        assert (place / ".stamp").read_text() == ""
        (place / "bin" / "python").unlink()  # it may lack anything
        second = subprocess.Popen(command, env=variables(packages), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        assert second.stderr is not None
        assert "another process installs into" in second.stderr.readline()
        connection.close()
    said = second.communicate(timeout=550)[1]
    assert second.returncode == 0, said
    assert version_in(place) == "1.0"


def test_a_change_that_was_ended_is_made_as_a_whole(
    site: Path, packages: Path, tmp_path: Path, fast: list[str]
) -> None:
    env, place = variables(packages), tmp_path / "env"
    assert made(site, NAME, "env", *fast, env=env, cwd=tmp_path)
    next(place.glob("lib/python3*/site-packages/tiny.py")).unlink()  # uv takes it for installed
    (place / ".unfinished").write_text("changed")
    assert made(site, NAME, "env", *fast, env=env, cwd=tmp_path)
    assert version_in(place) == "1.0"


def test_settings_of_pip_and_uv_that_lead_elsewhere_lead_nowhere(
    site: Path, packages: Path, tmp_path: Path, template: Path
) -> None:
    """Settings that ended such scripts of others: pypa/virtualenv#802, donnemartin/dev-setup#24, astral-sh/uv#9277."""
    (tmp_path / "config" / "pip").mkdir(parents=True)
    (tmp_path / "config" / "pip" / "pip.conf").write_text(
        f"[global]\nno-index = true\nfind-links = {packages}\n[install]\nuser = yes\nno-binary = :all:\n"
    )
    (tmp_path / "uv.toml").write_text('[pip]\nno-binary = ["tiny"]\n')
    (tmp_path / "tiny.py").write_text("version = 'of PYTHONPATH'\n")
    env = variables(
        packages,
        XDG_CONFIG_HOME=str(tmp_path / "config"),
        PIP_TARGET=str(tmp_path / "target"),
        PIP_REQUIRE_VIRTUALENV="1",
        PIP_REQUIRE_HASHES="1",
        PYTHONPATH=str(tmp_path),
        UV_SYSTEM_PYTHON="1",
        UV_REQUIRE_HASHES="1",
        UV_CONSTRAINT=str(tmp_path / "gone.txt"),
        UV_TORCH_BACKEND="auto",
        UV_EXCLUDE_NEWER="2001-01-01",
    )
    del env["PIP_NO_INDEX"], env["PIP_FIND_LINKS"], env["PIP_CONFIG_FILE"]
    status, said = run(site, NAME, "env", "--python", copying(template, tmp_path), env=env, cwd=tmp_path)
    assert status == 0, said
    assert version_in(tmp_path / "env") == "1.0"
    assert not (tmp_path / "target").exists()


def test_an_index_that_is_not_there_is_one_sentence(
    site: Path, packages: Path, tmp_path: Path, fast: list[str]
) -> None:
    env = variables(
        packages, PIP_INDEX_URL="http://me:secret@127.0.0.1:9/simple", PIP_RETRIES="0", NO_PROXY="127.0.0.1"
    )
    del env["PIP_NO_INDEX"], env["PIP_FIND_LINKS"]
    status, said = run(site, NAME, "env", *fast, env=env, cwd=tmp_path)
    assert status == 1
    last = said.splitlines()[-1]
    assert last.startswith(
        "install: the package index (http://127.0.0.1:9/simple) cannot be reached, or lacks a locked package; see the "
    )
    assert "secret" not in last
    assert (tmp_path / "env" / ".unfinished").read_text() == "made"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cpus", "env"], "unknown environment 'cpus'; expected one of "),
        ([NAME, "env", "--with", "task"], "--with 'task': expected one of tasks, traces"),
        ([NAME, "a:b"], "a:b' has a ':', which no environment can have; name another folder"),
        ([NAME, "file"], "file' is no folder; name another"),
        ([NAME, "file/env"], "'file/env': [Errno 20] Not a directory"),
        ([NAME, "mine"], "mine' is not empty; name a new folder, or remove it"),
        ([NAME, "next", "--anew"], "next' is an environment 'next'; name another folder"),
        ([NAME, "next", "--repair"], "next' is an environment 'next'; name another folder"),
        ([NAME, "mine", "--anew"], "mine' is not empty; name a new folder, or remove it"),
        ([NAME, "built", "--anew"], "built' is not empty; name a new folder, or remove it\n"),
        ([NAME, "linked", "--anew"], ".unfinished' is a link to somebody's file; name another folder"),
        ([NAME, "mine", "--repair"], "mine' exists and is no environment of Python 3.1"),
        ([NAME, "env", "--python", "./another"], f"is needed for {NAME!r} and './another' is not it; install it, or "),
        ([NAME, "env", "--python", "./bare"], "'./bare' lacks venv or ensurepip; install your system's package for"),
        ([NAME, "env", "--python", "./gone"], "and './gone' is not it; install it, or name it with --python"),
    ],
)  # fmt: skip
def test_it_is_refused_in_one_sentence(words: list[str], said: str, site: Path, packages: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("whole")
    (tmp_path / "built").mkdir()
    (tmp_path / "built" / ".stamp").write_text("of a Makefile\n")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / ".unfinished").symlink_to(tmp_path / "mine" / "thesis")
    (tmp_path / "file").touch()
    minor = sys.version_info[1]
    for name, answer in (("another", f"3 {minor + 7} True /x"), ("bare", f"3 {minor} False /x")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {answer}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "next").mkdir()
    (tmp_path / "next" / ".stamp").write_text("next 1234\n")
    before = sorted(tmp_path.iterdir())
    status, message = run(site, *words, env=variables(packages), cwd=tmp_path)
    assert status != 0
    assert said in message
    assert len(message.splitlines()) == 1
    assert message.startswith("install: ")
    assert sorted(tmp_path.iterdir()) == before
    assert [path.read_text() for path in (tmp_path / "mine").iterdir()] == ["whole"]
    assert (tmp_path / "built" / ".stamp").read_text() == "of a Makefile\n"
    assert (tmp_path / "linked" / ".unfinished").is_symlink()


def ends_at_once(command: Sequence[str], *rest: object) -> None:
    raise install.InstallError(command[0])


def test_a_link_is_replaced_and_never_what_it_leads_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "_run", ends_at_once)
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / ".stamp").write_text("of another checkout\n")
    (tmp_path / "env").symlink_to(shared)
    with pytest.raises(install.InstallError):
        install.install(NAME, str(tmp_path / "env"), flash_attn="", anew=True)
    assert (tmp_path / "env" / ".unfinished").read_text() == "made"
    assert not (tmp_path / "env").is_symlink()
    assert [path.name for path in shared.iterdir()] == [".stamp"]


def test_too_little_room_is_found_before_anything_is_made(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs

    def nearly_full(path: str) -> os.statvfs_result:
        found = list(real(path))
        found[4] = 10**8 // found[1]
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", nearly_full)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(install.InstallError) as error:
        install.install(NAME, str(tmp_path / "new" / "env"), flash_attn="")
    assert f" GB, and 0.1 GB are free in {str(tmp_path)!r}; make room, or name a folder on another disk" in str(
        error.value
    )
    assert not (tmp_path / "new").exists()
    # What lies in the cache of the same disk takes no room.
    for number in range(1000):
        (tmp_path / "cache" / "archive-v0" / str(number)).mkdir(parents=True)
    monkeypatch.setattr(install, "_run", ends_at_once)
    with pytest.raises(install.InstallError, match=r"python3\.\d+$"):
        install.install(NAME, str(tmp_path / "new" / "env"), flash_attn="")


@pytest.mark.parametrize("said", ["No space left on device (os error 28)", "Disk quota exceeded (os error 122)"])
def test_a_disk_that_becomes_full_is_one_sentence(said: str, tmp_path: Path) -> None:
    command = ["sh", "-c", f"echo 'error: failed to copy file: {said}' >&2; exit 2"]
    with pytest.raises(install.InstallError, match="the disk is full; make room, and run the same command again"):
        install._run(command, os.environ, tmp_path, "an index")


def test_a_failure_is_told_by_its_error_not_by_the_hint_below(tmp_path: Path) -> None:
    said = "error: Failed to build `tiny`\n  Caused by: no compiler\nhint: This usually indicates a problem"
    with pytest.raises(
        install.InstallError, match="sh ended with 2: error: Failed to build `tiny`; run the same command"
    ):
        install._run(["sh", "-c", 'echo "$0" >&2; exit 2', said], os.environ, tmp_path, "an index")


def test_a_program_that_may_not_run_is_one_sentence(tmp_path: Path) -> None:
    """A folder may lie on a disk that is mounted with `noexec`."""
    (tmp_path / "uv").touch()
    with pytest.raises(install.InstallError, match=r"uv' cannot be started: .*; name a folder whose programs may run"):
        install._run([str(tmp_path / "uv")], os.environ, tmp_path, "an index")


def test_a_wheel_that_lost_a_file_is_not_packed(site: Path, tmp_path: Path) -> None:
    (site / "verl_multiturn" / "__init__.py").unlink()
    with pytest.raises(
        install.InstallError, match=r"__init__\.py' is missing, which the wheel brought; install the wheel"
    ):
        install.pack(site, tmp_path)
    shutil.rmtree(site / "verl_multiturn-0.1.0.dist-info")
    with pytest.raises(install.InstallError, match="has no verl-multiturn that a wheel brought"):
        install.pack(site, tmp_path)


def test_the_packed_wheel_has_the_digests_of_its_files(site: Path, tmp_path: Path) -> None:
    (site / "verl_multiturn" / "install.py").chmod(0o755)
    install.pack(site, tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.getinfo("verl_multiturn/install.py").external_attr >> 16 == 0o100755
        lines = archive.read("verl_multiturn-0.1.0.dist-info/RECORD").decode().splitlines()
        for line in lines[:-1]:
            name, digest, size = line.replace('"', "").split(",")
            content = archive.read(name)
            own = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            assert (digest, size) == (f"sha256={own}", str(len(content)))


def test_every_environment_has_its_lock() -> None:
    assert {"cpu", "next", "gpu", "harbor"} <= set(install.environments())
    assert all((install.LOCKS / f"{name}.lock").is_file() for name in install.EXTRAS)


def test_no_module_beside_it_hides_one_of_the_standard_library() -> None:
    beside = {path.stem for path in (ROOT / "verl_multiturn").iterdir()}
    assert not beside & sys.stdlib_module_names


def old_pythons() -> Iterator[str]:
    """Yield interpreters older than any that an environment can have, as far as this machine has some."""
    found = [shutil.which(f"python3.{minor}") for minor in (7, 8, 9, 10)]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found += map(str, pyenv.glob("versions/3.[7-9].*/bin/python3"))
    for each in filter(None, found):
        if subprocess.run([each, "-c", ""], capture_output=True, check=False).returncode == 0:
            yield each


def test_an_old_python_names_one_that_fits(site: Path, packages: Path, tmp_path: Path) -> None:
    old = next(old_pythons(), None)
    if old is None:
        pytest.skip("this machine has no older Python")
    status, said = run(site, NAME, "env", "--python", old, env=variables(packages), cwd=tmp_path, python=old)
    assert (status, said.count("\n")) == (2, 1), said
    assert f"is needed for {NAME!r} and {old!r} is not it" in said
