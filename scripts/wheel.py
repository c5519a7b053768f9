"""Build the wheel, and use it as somebody does who has no checkout; `wheel.sh` starts it and describes it."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILT_FROM = ("verl_multiturn", "recipes", "tool_configs", "requirements", "setup.py", "pyproject.toml", "LICENSE")
"""Files and folders of the repository from which the wheel is built."""
ACCURACY = 0.95
"""Validation accuracy that the quickstart must reach."""
_HANDED_ON = re.compile(
    "PATH|LANG|LC_.*|TMPDIR|(PIP|UV|SSL|REQUESTS|CURL|PYENV)_.*|(HTTPS?|ALL|NO)_PROXY|XDG_CONFIG_DIRS"
)


def build(python: str, to: Path, *options: str, before: Callable[[Path], None] = lambda folder: None) -> Path:
    """Build the wheel from a copy of the repository's files, since a build writes beside them; return its path.

    Args:
        python: Interpreter with pip.
        to: Folder for the wheel.
        options: Of `pip wheel`, such as `--no-build-isolation`.
        before: Called with the folder of the copy before the build; a test puts there what builds leave.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in BUILT_FROM:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, folder)
        before(Path(folder))
        command = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(to), *options, folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = to.glob("verl_multiturn-*.whl")
    return wheel


def files_of_the_readme() -> dict[str, str]:
    """Return the tool and its YAML file, as the README shows them, by name."""
    found = re.findall(
        r"```\w+\n# (my_tools\.\w+)\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    return dict(found)


class Stranger:
    """Somebody in an empty folder, with an empty home folder and this machine's package index."""

    def __init__(self, folder: Path) -> None:
        self.work, home = folder / "work", folder / "home"
        self.work.mkdir()
        home.mkdir()
        self.seconds: dict[str, float] = {}
        cache = os.environ.get("UV_CACHE_DIR") or os.path.join(
            os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "uv"
        )
        kept = {name: value for name, value in os.environ.items() if _HANDED_ON.fullmatch(name.upper())}
        self.variables = {**kept, "HOME": str(home), "UV_CACHE_DIR": cache}

    def run(self, part: str, *command: str) -> None:
        """Run a command in the folder, and note its seconds; leave the program if it fails."""
        print(f"wheel: {part}: {' '.join(command)}", file=sys.stderr, flush=True)
        began = time.monotonic()
        done = subprocess.run(command, cwd=self.work, env=self.variables, stdout=sys.stderr, check=False)
        self.seconds[part] = round(time.monotonic() - began, 1)
        if done.returncode:
            print(json.dumps({"failed": part, "status": done.returncode, "seconds": self.seconds}))
            sys.exit(1)

    def view(self, program: str, run: str) -> int:
        """Start the viewer, fetch its page, and return the status; the viewer is ended as Ctrl-C does."""
        command = [program, "view", run]
        with subprocess.Popen(
            command, cwd=self.work, env=self.variables, stdout=subprocess.PIPE, encoding="utf-8"
        ) as viewer:
            try:
                assert viewer.stdout is not None
                address = viewer.stdout.readline().strip()
                direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
                with direct.open(address, timeout=120) as answer:
                    return int(answer.status)
            finally:
                viewer.send_signal(signal.SIGINT)
                viewer.communicate(timeout=120)


def try_wheel(folder: Path) -> dict[str, object]:
    """Go the whole way in an empty folder, and return its figures."""
    wheel = build(sys.executable, folder)
    stranger = Stranger(folder)
    bare, environment = stranger.work / "bare", stranger.work / "env"
    stranger.run("venv", sys.executable, "-m", "venv", str(bare))
    stranger.run("pip", str(bare / "bin" / "pip"), "install", "--quiet", str(wheel))
    stranger.run("install", str(bare / "bin" / "verl-multiturn"), "install", "cpu", "env")
    program = str(environment / "bin" / "verl-multiturn")
    places = "import verl_multiturn, verl; print(verl_multiturn.__file__)"
    python = [str(environment / "bin" / "python"), "-c", places]
    place = subprocess.run(
        python, cwd=stranger.work, env=stranger.variables, capture_output=True, encoding="utf-8", check=True
    )
    stranger.run("quickstart", program, "run", "quickstart")
    for name, text in files_of_the_readme().items():
        (stranger.work / name).write_text(text, encoding="utf-8")
    stranger.run("check-tool", program, "check-tool", "my_tools.yaml")
    summary = json.loads((stranger.work / "outputs" / "quickstart" / "summary.json").read_text(encoding="utf-8"))
    files = zipfile.ZipFile(wheel).namelist()
    return {
        "wheel_mb": round(wheel.stat().st_size / 1e6, 1),
        "files": len(files),
        "in_environment": str(environment) in place.stdout,
        "accuracy": summary["val_acc_after"],
        "violations": summary["certificate_violations"],
        "view_status": stranger.view(program, "outputs/quickstart"),
        "home": sorted(path.name for path in (folder / "home").iterdir()),
        "seconds": stranger.seconds,
    }


def main() -> None:
    """Print the figures; the exit status is 1 where one is not as it must be."""
    parser = argparse.ArgumentParser("wheel.sh")
    parser.add_argument("--keep", action="store_true")
    keep = parser.parse_args().keep
    folder = Path(tempfile.mkdtemp(prefix="wheel-"))
    try:
        figures = try_wheel(folder)
        good = figures["in_environment"] and figures["accuracy"] >= ACCURACY and not figures["violations"]  # type: ignore[operator]
        print(json.dumps({**figures, **({"folder": str(folder)} if keep else {})}))
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    sys.exit(0 if good and figures["view_status"] == 200 else 1)


if __name__ == "__main__":
    main()
