"""Made tasks in Harbor's form, and the made image that those in containers start from."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

WORDS = "one\ntwo\nthree\nfour\nfive\nsix\nseven\n"
ANSWER = len(WORDS.splitlines())
IMAGE = "localhost/verl-multiturn-made:1"
MISSING = "localhost/verl-multiturn-missing:1"
_INSTRUCTION = "Count the lines of /app/words.txt, and write the number into /app/answer.txt.\n"
_SOLUTION = "#!/bin/bash\nwc -l < /app/words.txt > /app/answer.txt\n"
_HONEST = f'[ "$(cat /app/answer.txt)" = {ANSWER} ] && reward=1 || reward=0\necho $reward > /logs/verifier/reward.txt'
_TESTS = {
    "honest": _HONEST,
    "crashing": "exit 3",
    # It dies of the file that it scores: the model's to choose.
    "dying": f"grep -q die /app/answer.txt && kill -9 $$\n{_HONEST}",
}
_TOML = """schema_version = "1.4"
artifacts = ["/app/answer.txt"]

[task]
name = "made/{name}"
version = "1.0.0"

[verifier]
timeout_sec = 600.0
environment_mode = "separate"

[agent]
timeout_sec = {agent_s}

[environment]
build_timeout_sec = 900.0
{image}
"""
_PROGRAMS = (
    "awk base64 basename bash cat chmod chown cp cut date dirname echo env find git grep gzip head id kill ln ls mkdir "
    "mv printf pwd rm sed seq sh sleep sort stat tail tar tee test timeout tmux touch tr true uname wc which"
)


def make_task(folder: Path, name: str, *, base: str, tests: str = "honest", agent_s: int = 900) -> Path:
    """Write a task, and return its folder.

    Args:
        folder: Where it goes.
        name: Its name.
        base: The base of its Dockerfile: an image, or `scratch`. `MISSING` is named as an image without one.
        tests: Which tests it has.
        agent_s: Seconds of the agent.
    """
    task = folder / name
    for each in ("environment", "tests", "solution"):
        (task / each).mkdir(parents=True, exist_ok=True)
    image = f'docker_image = "{MISSING}"' if base == MISSING else ""
    (task / "task.toml").write_text(_TOML.format(name=name, agent_s=agent_s, image=image), encoding="utf-8")
    (task / "instruction.md").write_text(_INSTRUCTION, encoding="utf-8")
    (task / "environment" / "words.txt").write_text(WORDS, encoding="utf-8")
    if not image:
        dockerfile = f"FROM {base}\nWORKDIR /app\nCOPY words.txt /app/words.txt\n"
        (task / "environment" / "Dockerfile").write_text(dockerfile, encoding="utf-8")
    (task / "tests" / "test.sh").write_text(f"#!/bin/bash\n{_TESTS[tests]}\n", encoding="utf-8")
    (task / "solution" / "solve.sh").write_text(_SOLUTION, encoding="utf-8")
    for script in (task / "tests" / "test.sh", task / "solution" / "solve.sh"):
        script.chmod(0o755)
    return task


def make_image() -> None:
    """Make `IMAGE` of programs of this machine and their libraries, some 15 MB; do nothing if it is there.

    Raises:
        subprocess.CalledProcessError: podman has failed.
    """
    if subprocess.run(["podman", "image", "exists", IMAGE]).returncode == 0:
        return
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        added: set[str] = set()
        for path in _files():
            if path not in added:
                added.add(path)
                tar.add(Path(path).resolve(), arcname=path.lstrip("/"), recursive=False)
        for name in ("bin", "lib", "lib64", "sbin"):  # links into /usr on most systems
            if os.path.islink(f"/{name}"):
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(f"/{name}")
                tar.addfile(entry)
        for name, mode in (("tmp", 0o1777), ("root", 0o700), ("app", 0o755), ("var/tmp", 0o1777)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            tar.addfile(entry)
        for name, text in (("etc/passwd", "root:x:0:0:root:/root:/bin/bash\n"), ("etc/group", "root:x:0:\n")):
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    subprocess.run(["podman", "import", "-", IMAGE], input=buffer.getvalue(), check=True, capture_output=True)


def _files() -> list[str]:
    """Return the programs, their libraries, and tmux's data on terminals."""
    found = []
    for name in _PROGRAMS.split():
        program = shutil.which(name)
        if program is None:
            raise RuntimeError(f"the made image needs {name!r}, which this machine has not; install it")
        said = subprocess.run(
            ["ldd", str(Path(program).resolve())], capture_output=True, text=True, encoding="utf-8", errors="replace"
        ).stdout
        found += [program, *re.findall(r"(/\S+)", said)]
    for folder in ("/lib/terminfo", "/usr/share/terminfo"):
        found += [str(path) for name in ("screen", "tmux", "xterm") for path in Path(folder).glob(f"?/{name}*")]
    found += [str(path) for path in Path("/usr/lib/locale").glob("C.utf8/**/*")]  # tmux asks for it
    places = [os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)) for path in found]
    return [path for path in places if os.path.isfile(path)]
