"""Make an environment of this package from its lock: Python, the locked packages, and this package itself.

    verl-multiturn install cpu DIR               from the wheel in which this file lies
    python verl_multiturn/install.py cpu DIR     in a checkout, which is installed editable; the scripts do this

This one file does it, and it needs 3.7 and the standard library alone: an old Python can report that it is too old. pip
installs uv, pinned, into the environment, and uv all else, without dependencies: a lock is complete, and cannot be
resolved, since SGLang's own pins contradict verl's.

`DIR/.unfinished` is there, and locked, while packages are installed. `DIR/.stamp` is written last. So an environment
whose making was killed is never taken for a finished one, and a second process waits for the first.
"""

from __future__ import annotations

import argparse
import ast
import base64
import csv
import glob
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).resolve().parent
_IN_CHECKOUT = (_PACKAGE.parent / "setup.py").is_file()
LOCKS = _PACKAGE.parent / "requirements" if _IN_CHECKOUT else _PACKAGE / "shipped" / "requirements"
"""The folder of the locks, `NAME.lock`."""
FLASH_ATTN_VERSION = "2.8.3"
CUDA = 13
"""Release of the compiler with which flash-attn is built: that of torch's CUDA."""


class Environment(NamedTuple):
    """One of the environments that can be made; the table of them is `ENVIRONMENTS`."""

    use: str
    pythons: Sequence[tuple[int, int]]
    """The versions of Python for which its lock was made."""
    gb: float
    """Gigabytes that it takes."""
    has_package: bool = True
    """Whether this package is installed into it."""
    glibc: tuple[int, int] = (2, 28)


ENVIRONMENTS = {
    "cpu": Environment("the quickstart and smoke runs, on a CPU", [(3, 11)], 6.6),
    "next": Environment("the same with the next set of versions", [(3, 11)], 7.0),
    "gpu": Environment("training", [(3, 12)], 12, glibc=(2, 34)),
    "harbor": Environment("Harbor's trials", [(3, 12)], 0.4, has_package=False),
    "verifiers": Environment("environments of verifiers", [(3, 11), (3, 12)], 0.7, has_package=False),
}
EXTRAS = {
    "tasks": "packages with task sets",
    "traces": "backends of traces",
    "a2a": "the SDK of A2A",
    "docs": "what builds the site",
    "browser": "what drives a browser in tests",
    "templates": "chat templates for tests",  # of a package that must not be importable: its lock has the reason
}
"""Locks with further packages, for environments that have this package."""
_PIP_SOURCES = re.compile(
    "(extra-)?index-url|find-links|no-index|trusted-host|(client-)?cert|proxy|timeout|retries|keyring-.*|.*cache.*"
)
"""Settings of pip about where packages come from. Others are of the user's own installations, as `user = yes` is."""
_STRAY = re.compile(
    "PYTHONPATH|PYTHONHOME|PIP_.*|UV_(PYTHON|SYSTEM_PYTHON|MANAGED_PYTHON|BREAK_SYSTEM_PACKAGES|WORKING_DIR|PROJECT"
    "|CONSTRAINT|OVERRIDE|EXCLUDE|EXCLUDE_NEWER|BUILD_CONSTRAINT|REQUIRE_HASHES|NO_BINARY|NO_BUILD|NO_BUILD_ISOLATION"
    "|NO_EDITABLE|RESOLUTION|PRERELEASE|TORCH_BACKEND)"
)
"""Variables that would install other packages than the lock's, or elsewhere. All others are handed on."""
_FULL = "the disk is full; make room, and run the same command again, which begins anew"
_NOISE = re.compile(r" [-+~] |(Using|Audited|Resolved) ")
_NO_ROOM = re.compile("No space left on device|Disk quota exceeded|os error 28|os error 122")
_NO_INDEX = re.compile(
    "error sending request|Failed to (fetch|download)|client error|Connection refused|timed out|Network connectivity "
    "is disabled|No matching distribution|Could not find a version|not found in the (package registry|cache|provided)"
    "|no version of|Retrying|ProxyError|SSLError|NewConnectionError"
)
_UV_PYTHONS = "~/.local/share/uv/python"
_ABOUT = (
    "import sys, importlib.util as u; print(*sys.version_info[:2], all(map(u.find_spec, ['venv', 'ensurepip'])), "
    "getattr(sys, '_base_executable', '') or sys.executable)"
)


_held_files: list[int] = []
"""Locks of this process. Its children have them, too: one that outlives it still changes the environment."""


class InstallError(Exception):
    """An environment that cannot be made, or was not; the text is one sentence."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status
        """Exit status: 2 where nothing was begun, 1 where something failed."""


def environments() -> dict[str, Environment]:
    """Return the environments whose lock is here, by name; the command and its help use it."""
    return {name: each for name, each in ENVIRONMENTS.items() if (LOCKS / f"{name}.lock").is_file()}


def install(
    name: str,
    folder: str,
    python: str = "",
    extras: Sequence[str] = (),
    flash_attn: str | None = None,
    anew: bool = False,
    repair: bool = False,
) -> bool:
    """Make an environment in a folder; the command `verl-multiturn install` and the scripts call it.

    Args:
        name: Name of the environment, one of `environments()`.
        folder: New, empty, or one in which this function was ended before.
        python: Interpreter that makes it. Empty: this one, or one that is found, of a version that fits.
        extras: Names of `EXTRAS`, whose packages are installed, too.
        flash_attn: For `gpu`: path or address of a wheel; empty to go without; None to build it from its source.
        anew: Whether an environment of another state that this function made there is removed first.
        repair: Whether the packages are installed over those of an environment that is there.

    Returns:
        Whether something was installed; False where the environment was right already.

    Raises:
        InstallError: It cannot be made, or the installation failed.
    """
    known = environments()
    if name not in known:
        raise InstallError(f"unknown environment {name!r}; expected one of {', '.join(known)}")
    for extra in extras:
        if extra not in EXTRAS or not known[name].has_package:
            raise InstallError(f"--with {extra!r}: expected one of {', '.join(EXTRAS)}, for an environment with verl")
    if flash_attn and "://" not in flash_attn:
        if not os.path.isfile(flash_attn):
            raise InstallError(f"--flash-attn {flash_attn!r}: no such file")
        flash_attn = os.path.realpath(flash_attn)
    target = Path(os.path.abspath(os.path.expanduser(folder)))
    if os.pathsep in str(target):
        raise InstallError(f"{str(target)!r} has a {os.pathsep!r}, which no environment can have; name another folder")
    try:
        with tempfile.TemporaryDirectory(prefix="verl-multiturn-") as stage:
            stamp = _stage(name, Path(stage))
            wanted = _Installation(name, target, Path(stage), stamp, flash_attn if name == "gpu" else "")
            return wanted.complete(python, extras, anew, repair)
    except OSError as error:
        full = _NO_ROOM.search(f"os error {error.errno}")
        raise InstallError(_FULL if full else f"{folder!r}: {error}; name a folder that can be written to", 1) from None


def _stage(name: str, stage: Path) -> str:
    """Copy the locks, and this package's wheel, to where nothing replaces them meanwhile; return the stamp."""
    for lock in LOCKS.glob("*.lock"):
        shutil.copy(str(lock), str(stage))
    contents = _text(LOCKS / f"{name}.lock") + _text(LOCKS / "uv.lock")
    if ENVIRONMENTS[name].has_package:
        root = _PACKAGE.parent
        contents += f"{_text(root / 'setup.py')} {root}" if _IN_CHECKOUT else pack(root, stage)
    return f"{name} {hashlib.sha256(contents.encode()).hexdigest()}"


def pack(site: Path, to: Path) -> str:
    """Write the wheel from which this package was installed once more; return its RECORD.

    Args:
        site: The folder of installed packages.
        to: The folder into which the wheel is written.

    Raises:
        InstallError: It was not installed from a wheel, or files of it are missing.
    """
    record = next(site.glob("verl_multiturn-*.dist-info/RECORD"), None)
    if record is None:
        raise InstallError(
            f"{str(site)!r} has no verl-multiturn that a wheel brought; install its wheel, or a checkout"
        )
    info = record.parent.name
    with record.open(newline="", encoding="utf-8") as file:
        names = sorted(row[0] for row in csv.reader(file) if row)
    of_installer = re.compile(rf"\.\.|/|.*__pycache__|{re.escape(info)}/(RECORD|INSTALLER|REQUESTED|direct_url|uv_)")
    wheel = to / f"{info[: -len('.dist-info')]}-py3-none-any.whl"
    lines = []
    with zipfile.ZipFile(str(wheel), "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            if of_installer.match(name):
                continue
            if not (site / name).is_file():
                raise InstallError(f"{str(site / name)!r} is missing, which the wheel brought; install the wheel again")
            content = (site / name).read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            lines.append(f'"{name}",sha256={digest},{len(content)}\n')
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (site / name).stat().st_mode << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), "".join([*lines, f"{info}/RECORD,,\n"]))
    return "".join(lines)


class _Installation(NamedTuple):
    """An environment that is to be made or repaired."""

    name: str
    target: Path
    stage: Path
    """A folder with copies of the locks and of the wheel: those in the environment itself may be replaced."""
    stamp: str
    flash_attn: str | None

    @property
    def python(self) -> str:
        return str(self.target / "bin" / "python")

    def has_flash_attn(self) -> bool:
        """Return whether flash-attn is installed and fits torch, or is not wanted."""
        if self.flash_attn == "":
            return True
        program = (
            "import importlib.metadata, torch, flash_attn_2_cuda; "
            f"assert importlib.metadata.version('flash-attn').split('+')[0] == {FLASH_ATTN_VERSION!r}"
        )
        return _output([self.python, "-I", "-c", f"{program}; print('well')"]) == "well\n"

    def complete(self, python: str, extras: Sequence[str], anew: bool, repair: bool) -> bool:
        """Install what is missing; see `install`."""
        environment = ENVIRONMENTS[self.name]
        while True:
            state = self._state(anew, repair)
            missing = [each for each in extras if _text(self.target / f".{each}") != _text(LOCKS / f"{each}.lock")]
            if state == "finished" and not missing and self.has_flash_attn():
                return False
            base = _find_python(environment, self.name, python) if state == "empty" else ""
            self._check(environment, base)
            if anew and self.target.is_symlink():
                self.target.unlink()  # the environment behind it is somebody else's
            with _held(self.target):
                if self._state(anew, repair) == state:  # else another process has ended its work meanwhile
                    self._fill(environment, base, missing if state == "finished" else extras, state)
                    return True

    def _state(self, anew: bool, repair: bool) -> str:
        """Return the state of the folder: `empty`, `finished`, `changed` (not to its end), or `repair`.

        An environment that was not made to its end, and one that is to be made anew, are `empty`.
        """
        if os.path.lexists(self.target) and not self.target.is_dir() and not anew:
            raise InstallError(f"{str(self.target)!r} is no folder; name another")
        begun, stamp = _text(self.target / ".unfinished"), _text(self.target / ".stamp").strip()
        if not begun and stamp == self.stamp:
            return "finished"
        other = stamp.split(" ")[0]
        if other in ENVIRONMENTS and other != self.name:
            raise InstallError(f"{str(self.target)!r} is an environment {other!r}; name another folder")
        names = os.listdir(str(self.target)) if self.target.is_dir() else []
        linked = [each for each in (".unfinished", ".stamp") if (self.target / each).is_symlink()]
        if linked:
            raise InstallError(f"{str(self.target / linked[0])!r} is a link to somebody's file; name another folder")
        # Other programs write a file `.stamp`, too. Earlier versions of this one wrote another text.
        is_ours = other in ENVIRONMENTS or ((begun or stamp) and "pyvenv.cfg" in names)
        if begun == "made" or not set(names) - {".unfinished"} or (anew and (is_ours or self.target.is_symlink())):
            return "empty"
        if begun or repair:
            return begun or "repair"
        raise InstallError(
            f"{str(self.target)!r} is not empty; name a new folder, or remove it"
            + (": it has other versions. --repair installs over them, --anew removes them" if stamp and is_ours else "")
        )

    def _check(self, environment: Environment, base: str) -> None:
        """Check all that would end the installation after minutes.

        Raises:
            InstallError: The environment cannot be made here.
        """
        found = (*platform.libc_ver(), "0")[1] or "0"
        if sys.platform != "linux" or platform.machine() != "x86_64" or _numbers(found) < environment.glibc:
            needed = ".".join(map(str, environment.glibc))
            raise InstallError(
                f"{self.name!r} is locked for Linux on x86-64 with glibc {needed} or newer, and this is "
                f"{platform.system()} on {platform.machine()} with {found}; use another machine"
            )
        if self.flash_attn is None and not self.has_flash_attn():
            nvcc = os.path.join(os.environ.get("CUDA_HOME") or "/usr/local/cuda", "bin", "nvcc")
            nvcc = nvcc if os.access(nvcc, os.X_OK) else shutil.which("nvcc") or ""
            if not nvcc or f"release {CUDA}." not in _output([nvcc, "--version"]):
                raise InstallError(
                    f"building flash-attn needs CUDA {CUDA}'s nvcc, and {nvcc or 'nvcc'!r} is not it; set CUDA_HOME, "
                    "or give --flash-attn WHEEL or --without-flash-attn"
                )
        if not base and not _fits(environment, self.python):
            raise InstallError(
                f"{str(self.target)!r} exists and is no environment of Python {_named(environment)}; remove it, or "
                "name another"
            )
        place = os.statvfs(str(_nearest(self.target)))
        free_gb = place.f_bavail * place.f_frsize / 1e9
        if base and free_gb < environment.gb and not self._is_cached():
            raise InstallError(
                f"{self.name!r} takes some {environment.gb:g} GB, and {free_gb:.1f} GB are free in "
                f"{str(_nearest(self.target))!r}; make room, or name a folder on another disk"
            )

    def _is_cached(self) -> bool:
        """Return whether uv's cache seems to hold the packages, on the same disk: then they are links."""
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        archives = os.path.join(os.environ.get("UV_CACHE_DIR") or f"{home}/uv", "archive-v0")
        if not os.path.isdir(archives) or os.stat(archives).st_dev != os.stat(str(_nearest(self.target))).st_dev:
            return False
        return len(os.listdir(archives)) >= len(re.findall("(?m)^[a-zA-Z0-9].*==", _text(LOCKS / f"{self.name}.lock")))

    def _fill(self, environment: Environment, base: str, extras: Sequence[str], state: str) -> None:
        """Make the environment, or what it lacks, and stamp it."""
        (self.target / ".unfinished").write_text("made" if base else "changed", encoding="utf-8")
        if base:
            _empty(self.target)
            print(f"install: {self.name}: some {environment.gb:g} GB into {str(self.target)!r}", file=sys.stderr)
            _run([base, "-I", "-m", "venv", str(self.target)], {**os.environ}, self.stage, "venv")
        again = ["--reinstall"] if state == "changed" else []
        if state != "finished":
            (self.target / ".stamp").write_text("", encoding="utf-8")
            self.install_packages(*again, "-r", str(self.stage / f"{self.name}.lock"))
        for extra in extras:
            into = ["--target", str(self.target / "share" / extra)] if extra == "templates" else []
            self.install_packages("--reinstall", *into, "-r", str(self.stage / f"{extra}.lock"))
            shutil.copy(str(self.stage / f"{extra}.lock"), str(self.target / f".{extra}"))
        if not self.has_flash_attn():
            self._add_flash_attn()
        if environment.has_package and state != "finished":
            self._add_package()
        (self.target / ".stamp").write_text(self.stamp + "\n", encoding="utf-8")
        (self.target / ".unfinished").unlink()

    def _add_flash_attn(self) -> None:
        if self.flash_attn:
            self.install_packages("--reinstall", self.flash_attn)
        else:
            print("install: building flash-attn (MAX_JOBS bounds the jobs; each takes 9 GB of memory)", file=sys.stderr)
            # Without this variable, its setup looks for a wheel for CUDA 12, whatever torch has.
            os.environ["FLASH_ATTENTION_FORCE_BUILD"] = "TRUE"
            build = ("--no-build-isolation", "--no-binary", "flash-attn", "--reinstall")
            self.install_packages(*build, f"flash-attn=={FLASH_ATTN_VERSION}")
        # SGLang needs `flash_attn.cute` from flash-attn-4, which flash-attn has just replaced by an older one.
        lines = _text(self.stage / "gpu.lock").splitlines()
        self.install_packages("--reinstall", *(line for line in lines if line.startswith("flash-attn-4==")))
        if not self.has_flash_attn():
            raise InstallError(
                f"flash-attn from {self.flash_attn or 'its source'!r} is not {FLASH_ATTN_VERSION} for Python 3.12, "
                f"torch 2.11 and CUDA {CUDA}; give another wheel, or build it",
                1,
            )

    def _add_package(self) -> None:
        if _IN_CHECKOUT:
            self.install_packages("--no-build-isolation", "-e", str(_PACKAGE.parent))
            return
        (wheel,) = self.stage.glob("*.whl")
        (self.target / "share").mkdir(exist_ok=True)
        # There it stays, since `pip freeze` names the place.
        self.install_packages("--reinstall", shutil.copy(str(wheel), str(self.target / "share")))

    def install_packages(self, *words: str) -> None:
        """Install packages with `uv pip install` and these words of its command line."""
        run_uv(self.target, words, self.stage)


def run_uv(folder: Path, words: Sequence[str], cwd: Path = LOCKS) -> None:
    """Run `uv pip install --no-deps` of an environment, with the index and the certificates of pip's settings.

    Args:
        folder: The environment. uv is installed into it first, where it is missing.
        words: Further words of the command line: options, packages.
        cwd: Folder with the locks in which it runs; no project whose own settings uv would read may be around it.

    Raises:
        InstallError: It failed.
    """
    python, uv = str(folder / "bin" / "python"), str(folder / "bin" / "uv")
    pip = [python, "-I", "-m", "pip"]
    sources = _pip_sources(_settings_of_pip(python))
    variables = {name: value for name, value in os.environ.items() if not _STRAY.fullmatch(name)}
    for_uv = {**_uv_variables(sources, variables), **variables}
    index = re.sub("//[^/]*@", "//", for_uv.get("UV_DEFAULT_INDEX") or for_uv.get("UV_INDEX_URL") or "uv's default")
    wanted = re.findall("(?m)^uv==(.*)", _text(cwd / "uv.lock"))[0]
    if not os.access(uv, os.X_OK) or wanted not in _output([uv, "--version"]).split():
        if not _settings_of_pip(python) and not _output([*pip, "--version"]):  # uv makes environments without it
            _run([python, "-I", "-m", "ensurepip"], variables, cwd, index)
        # Only these settings, since others would put uv elsewhere.
        for_pip = {f"PIP_{key.replace('-', '_').upper()}": value for key, value in sources.items()}
        if "UV_DEFAULT_INDEX" in variables:
            for_pip.setdefault("PIP_INDEX_URL", variables["UV_DEFAULT_INDEX"])
        command = [*pip, "install", "--quiet", "--disable-pip-version-check", "--no-deps", f"uv=={wanted}"]
        _run(command, {"PIP_RETRIES": "2", **variables, **for_pip, "PIP_CONFIG_FILE": os.devnull}, cwd, index)
    no_index = ["--no-index"] if _is_on(sources.get("no-index", "")) else []
    command = [uv, "pip", "install", "--system-certs", "--no-deps", *no_index, "--python", python, *words]
    _run(command, for_uv, cwd, index)


@lru_cache(maxsize=8)
def _settings_of_pip(python: str) -> str:
    return _output([python, "-I", "-m", "pip", "config", "list"])


def _pip_sources(listed: str) -> dict[str, str]:
    """Return pip's settings about where packages come from, by its list of all settings; variables go before files."""
    found = re.findall(r"(?m)^(global|install|:env:)\.([\w-]+)=(.*)$", listed)
    ranked = sorted(found, key=lambda each: ("global", "install", ":env:").index(each[0]))
    return {key: str(ast.literal_eval(value)) for _, key, value in ranked if _PIP_SOURCES.fullmatch(key)}


def _uv_variables(sources: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which uv takes packages from where pip does. Variables of uv's own go before them."""
    found = {"UV_HTTP_TIMEOUT": "120"}
    if "index-url" in sources and "UV_INDEX_URL" not in variables:
        found["UV_DEFAULT_INDEX"] = sources["index-url"]
    if _is_on(sources.get("no-index", "")):
        # Beside an index, the files could be of other builds than those that the lock was tried with.
        found["UV_FIND_LINKS"] = ",".join(sources.get("find-links", "").split())
    if "trusted-host" in sources:
        found["UV_INSECURE_HOST"] = sources["trusted-host"]
    if "cert" in sources:
        found["SSL_CERT_FILE"] = sources["cert"]
    if "proxy" in sources:
        found["ALL_PROXY"] = sources["proxy"]
    return found


def _is_on(value: str) -> bool:
    return value.lower() in ("1", "true", "yes", "on")


def _run(command: Sequence[str], variables: Mapping[str, str], cwd: Path, index: str) -> None:
    """Run a program, show what it reports, and raise one sentence where it fails."""
    last: list[str] = []
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, env={**variables}, cwd=str(cwd), stdin=null, stdout=null, stderr=pipe, pass_fds=_held_files
        )
    except OSError as error:
        message = f"{command[0]!r} cannot be started: {error}; name a folder whose programs may run"
        raise InstallError(message, 1) from None
    with process:
        assert process.stderr is not None
        for said in process.stderr:
            line = said.decode(errors="replace")
            last = [*last[-30:], line.strip()]
            if not _NOISE.match(line):
                print(line, end="", file=sys.stderr)
    if process.returncode == 0:
        return
    everything = "\n".join(last)
    if _NO_ROOM.search(everything):
        raise InstallError(_FULL, 1)
    if _NO_INDEX.search(everything):
        raise InstallError(
            f"the package index ({index}) cannot be reached, or lacks a locked package; see the lines above, name "
            "an index (`pip config set global.index-url URL`, or UV_DEFAULT_INDEX), and run the same command again",
            1,
        )
    cause = next((line for line in reversed(last) if re.search("error|×", line.lower())), (last or ["no message"])[-1])
    program = os.path.basename(command[0])
    raise InstallError(f"{program} ended with {process.returncode}: {cause}; run the same command again", 1)


def _find_python(environment: Environment, name: str, named: str) -> str:
    """Return the interpreter that makes an environment, outside of any other environment."""
    tried = [named] if named else [sys.executable]
    for minor in [] if named else _named(environment).split(" or "):
        pyenv, uv = os.environ.get("PYENV_ROOT", "~/.pyenv"), os.environ.get("UV_PYTHON_INSTALL_DIR", _UV_PYTHONS)
        places = f"{pyenv}/versions/{minor}*/bin/python{minor}", f"{uv}/cpython-{minor}*/bin/python{minor}"
        tried += [f"python{minor}", *(path for place in places for path in glob.glob(os.path.expanduser(place)))]
    fit = [each for each in tried if _fits(environment, each)]
    for each in fit:
        *_, complete, base = _output([each, "-I", "-c", _ABOUT]).split(maxsplit=3)
        if complete == "True":
            return base.strip()
    if fit:
        raise InstallError(f"{fit[0]!r} lacks venv or ensurepip; install your system's package for them (python3-venv)")
    raise InstallError(
        f"Python {_named(environment)} is needed for {name!r} and {tried[1 - bool(named)]!r} is not it; install it, or "
        "name it with --python"
    )


def _fits(environment: Environment, python: str) -> bool:
    return _numbers(_output([python, "-I", "-c", _ABOUT])[:6].replace(" ", ".")) in environment.pythons


def _named(environment: Environment) -> str:
    return " or ".join(f"{major}.{minor}" for major, minor in environment.pythons)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _output(command: Sequence[str]) -> str:
    """Return what a program prints; empty where it cannot be started."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=False,
            timeout=120,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _nearest(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that is there."""
    return next(each for each in (folder, *folder.parents) if each.is_dir())


def _empty(folder: Path) -> None:
    """Remove all that is in a folder, but not the folder: a shell may be in it, or another disk be mounted there."""
    for each in folder.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(str(each))
        elif each.name != ".unfinished":
            each.unlink()


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Make a folder, and keep every other process that would install into it waiting."""
    import fcntl  # other systems, which are refused before, lack it

    marker = folder / ".unfinished"
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        file = marker.open("a", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"install: another process installs into {str(folder)!r}; waiting for its end", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        if marker.exists() and os.path.samestat(os.fstat(file.fileno()), marker.stat()):
            break
        file.close()  # the other process has removed it at its end
    _held_files.append(file.fileno())
    try:
        yield
    finally:
        _held_files.remove(file.fileno())
        if marker.exists() and not _text(marker):
            marker.unlink()  # nothing was begun
        file.close()


def main(words: Sequence[str]) -> int:
    """Make an environment as a command line says; the scripts call it. Return the exit status."""
    parser = argparse.ArgumentParser("install", epilog="`verl-multiturn install --help` explains them.")
    parser.add_argument("name", metavar="NAME", help=", ".join(environments()))
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("--python", metavar="PATH", default="")
    parser.add_argument("--with", metavar="NAME", dest="extras", action="append", default=[])
    flash_attn = parser.add_mutually_exclusive_group()
    flash_attn.add_argument("--flash-attn", metavar="WHEEL")
    flash_attn.add_argument("--without-flash-attn", action="store_true")
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--repair", action="store_true")
    given = parser.parse_args(words)
    wheel = "" if given.without_flash_attn else given.flash_attn
    try:
        install(given.name, given.folder, given.python, given.extras, wheel, given.anew, given.repair)
    except InstallError as error:
        print(f"install: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print("install: interrupted; the same command begins anew", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
