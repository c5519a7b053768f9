"""What `verl-multiturn doctor` looks at."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

# The set that is known to work together; verl moves, so its minor version is pinned.
_PINNED = {"verl": "0.9.1", "sglang": "0.5.12", "torch": "2.11.0", "transformers": "5.9.0", "tensordict": "0.10.0"}


@dataclass(frozen=True)
class Finding:
    """One thing looked at; `remedy` is empty when it is well."""

    what: str
    ok: bool
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Versions, platform, and whether verl knows the plugin."""
    findings = [_python(), *(_version(name, version) for name, version in _PINNED.items())]
    registered = all(finding.ok or finding.found != "not installed" for finding in findings)
    findings.append(_free_disk())
    if registered:
        findings.append(_registration())
    return findings


def _python() -> Finding:
    found = sys.version.split()[0]
    ok = sys.version_info[:2] in ((3, 11), (3, 12))
    return Finding("Python", ok, found, "" if ok else "use Python 3.11 or 3.12")


def _version(name: str, expected: str) -> Finding:
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, "not installed", f"pip install {name}=={expected}")
    same = found.split("+")[0].split(".")[:3] == expected.split(".")
    return Finding(name, same, found, "" if same else f"written for {expected}: pip install {name}=={expected}")


def _free_disk() -> Finding:
    free_gb = shutil.disk_usage("/tmp").free / 1e9
    return Finding(
        "space in /tmp (Ray)", free_gb > 2, f"{free_gb:.0f} GB free", "" if free_gb > 2 else "Ray needs 2 GB there"
    )


def _registration() -> Finding:
    """In a process of its own: what `import verl` prints and registers there is what a run would get."""
    program = (
        "import verl\n"
        "from verl.plugin.platform import get_platform\n"
        "from verl.workers.rollout.base import _ROLLOUT_REGISTRY as rollouts\n"
        "from verl.experimental.agent_loop.agent_loop import _agent_loop_registry as loops\n"
        "assert ('sglang_async', 'async') in rollouts, 'rollout sglang_async is not registered'\n"
        "assert 'multiturn_agent' in loops, 'agent loop multiturn_agent is not registered'\n"
        "print('platform:', get_platform().device_name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=dict(os.environ), timeout=300
    )
    if done.returncode == 0:
        return Finding("plugin in verl", True, f"registered; {done.stdout.strip().splitlines()[-1]}")
    said = (done.stderr.strip().splitlines() or ["no message"])[-1]
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    remedy = "reinstall: pip install --force-reinstall --no-deps verl-multiturn"
    if policy != "auto":
        remedy = f"VERL_USE_EXTERNAL_PLUGINS={policy!r} keeps plugins out; unset it"
    return Finding("plugin in verl", False, said, remedy)
