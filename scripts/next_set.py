"""Try the next set of versions in the environment of this Python; `next.sh` starts it and describes it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from verl_multiturn.install import InstallError, run_uv
from verl_multiturn.runs.version_sets import installed, judge

OUT = Path("outputs/next")
CONTRACT = "verl_multiturn.verl_bridge.compat.contract"


def said_by(part: str, *command: str, **environment: str) -> tuple[int, list[str]]:
    """Run a command with its output in a file; return its exit status and the lines of the output."""
    log = OUT / f"{part}.log"
    print(f"next: {part}: {' '.join(command)} > {log}", flush=True)
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, check=False, env={**os.environ, **environment}
        )
    return done.returncode, log.read_text(errors="replace", encoding="utf-8").splitlines()


def names(sglang: str | None = None) -> list[str]:
    """Return the parts that the contract finds missing or changed, with another SGLang if one is given."""
    environment = {}
    if sglang is not None:
        folder = (OUT / f"sglang-{sglang}").resolve()
        try:
            run_uv(Path(sys.prefix), ["--target", str(folder), f"sglang=={sglang}"])
        except InstallError as error:
            return [f"sglang {sglang} was not installed: {error}"]
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}
    status, lines = said_by("contract", sys.executable, "-m", CONTRACT, **environment)
    faults = [line for line in lines if ", which " in line]
    return faults or ([f"ended with {status}: {lines[-1] if lines else ''}"] if status else [])


def tests(part: str, marks: str, *folders: str) -> list[str]:
    """Return the tests of some marks that fail."""
    status, lines = said_by(part, sys.executable, "-m", "pytest", "-q", "-m", marks, *folders)
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return failed or ([f"ended with {status}: {lines[-1] if lines else ''}"] if status else [])


def training(recipe: str, *words: str) -> list[str]:
    """Return the faults of a short training of a recipe."""
    out = OUT / recipe
    shutil.rmtree(out, ignore_errors=True)
    status, lines = said_by(recipe, "bash", f"recipes/{recipe}/run.sh", *words, "--out", str(out))
    if status:
        errors = [line for line in lines if "Error" in line]
        return [(errors or lines or [f"ended with {status}"])[-1].strip()]
    objects = [line for line in lines if line.startswith("{") and line.endswith("}")]
    if not objects:
        return ["no result at the end of its output"]
    summary = json.loads(objects[-1])
    faults = []
    if summary["steps"] < 1 or not summary["certificate_rows"]:
        faults.append(f"{summary['steps']} steps, {summary['certificate_rows']} rows verified")
    if summary["certificate_violations"]:
        faults.append(f"{summary['certificate_violations']} violations of the certificate")
    return faults


PARTS: dict[str, Callable[[], list[str]]] = {
    "contract": names,
    "fast": lambda: tests("fast", "not stack and not engine and not long", "tests/unit"),
    "stack": lambda: tests("stack", "stack and not engine and not deaths and not long"),
    "quickstart": lambda: training("quickstart", "--steps", "2"),
    "image_zoom": lambda: training("image_zoom", "--smoke"),
}


def main() -> int:
    """Run the parts, print the failures and one JSON object; return 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="next.sh")
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--sglang")
    asked = parser.parse_args()
    if asked.sglang and asked.only not in (None, ["contract"]):
        parser.error(f"--sglang runs the part contract alone, got --only {' --only '.join(asked.only)}; leave one out")
    OUT.mkdir(parents=True, exist_ok=True)
    parts = {"contract": lambda: names(asked.sglang)} if asked.sglang else PARTS
    result: dict[str, object] = {"set": judge().nearest.name, "versions": installed() | sglang_of(asked.sglang)}
    seconds: dict[str, float] = {}
    failed: dict[str, list[str]] = {}
    for part, run in parts.items():
        if asked.only and part not in asked.only:
            continue
        began = time.monotonic()
        faults = run()
        seconds[part] = round(time.monotonic() - began)
        if faults:
            failed[part] = faults
        print("\n".join([f"next: {part}: {'failed' if faults else 'ok'}", *faults]), flush=True)
    print(json.dumps(result | {"seconds": seconds, "failed": failed}))
    return 1 if failed else 0


def sglang_of(version: str | None) -> dict[str, str]:
    """Return the requested version of SGLang, by its distribution."""
    return {} if version is None else {"sglang": version}


if __name__ == "__main__":
    sys.exit(main())
