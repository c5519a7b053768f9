"""Rows of published SWE data sets, whose repositories are in images, as tasks in Harbor's form.

    environment/   FROM the row's image; hidden tests removed; git's history replaced by one commit
       └─ when the agent has ended: its changes since that commit, as a patch
    tests/         FROM the row's image as it is; the patch, less files that never count; the row's tests; grade.py

Later commits in an image hold the solution, and agents find it: in 21 of 100 runs of one model
(https://github.com/SWE-agent/mini-swe-agent/issues/787).

Invariants:
- the tests run in an environment that the agent never saw. Of its work a patch comes there, without tests, their
  configuration, start-up files and links (`changes.py` has the list);
- a patch that does not apply is reward 0; a patch that is not there is no reward, and Harbor's bridge names the cause;
- a row without a column that it needs is refused, and the column named.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.harnesses.harbor.tasks.write import HarborTask
from verl_multiturn.verdicts import import_places
from verl_multiturn.verdicts.changes import NEVER, RUNNERS

REPOSITORY = "/testbed"
"""The folder of the repository in the images of all three data sets."""
_MOST_PATCH_BYTES = 2 * 2**20
_TESTS_S = 1_800.0
_HIDDEN = ("run_tests.sh", "r2e_tests")
"""Files of the hidden tests in R2E-Gym's images, in the repository, at the root, or in the home."""
_GRADE = Path(__file__).with_name("grade.py")
_NEVER = {**NEVER, "a hidden test": _HIDDEN}
_ONE_COMMIT = f"""#!/bin/bash
# Leaves the repository as it is, without its history.
set -eu
cd {REPOSITORY}
rm -rf {" ".join(f"{place}/{name}" for place in (REPOSITORY, "", "/root") for name in _HIDDEN)}
tracked=$(mktemp)
git ls-files -z > "$tracked"
find . -name .git -prune -exec rm -rf {{}} +
git init -q
git add -A
there='for each; do if [ -e "$each" ] || [ -L "$each" ]; then printf "%s\\0" "$each"; fi; done'
xargs -0 -r sh -c "$there" sh < "$tracked" | xargs -0 -r git add -f --
git -c user.name=task -c user.email=task@localhost commit -q --allow-empty -m "The repository as it is"
git rev-parse HEAD > /var/tmp/first-commit
rm "$tracked"
"""
_COLLECT = (
    f"mkdir -p /logs/artifacts && cd {REPOSITORY} && git add -A && git -c core.fsmonitor= diff --cached --binary "
    '--no-ext-diff --no-textconv --no-color --no-renames "$(cat /var/tmp/first-commit)" > /logs/artifacts/work.patch'
)
_TEST = """#!/bin/bash
# Applies what counts of the agent's changes, runs the row's tests, and writes the reward.
patch=/logs/artifacts/work.patch
[ -e "$patch" ] && cd {repository} || exit 1
mkdir -p /logs/verifier
git config --global --add safe.directory {repository}
# The command that collects the patch writes plain files alone, and moves none; an agent's own git writes what it likes.
plain=' (create mode 100(644|755)|delete mode [0-9]+|mode change 100(644|755) => 100(644|755)) .*'
heads='index [0-9a-f]+\\.\\.[0-9a-f]+( 100(644|755))?|(old|new|new file) mode 100(644|755)'
if [ -s "$patch" ]; then
    git apply --summary "$patch" > /tmp/summary
    python3 -I -S /tests/import_places.py /tests/names.json < /tmp/summary > /tmp/shadows || exit 1
    mapfile -t shadows < /tmp/shadows
    if [ "$(stat -c %s "$patch")" -gt {most} ] || grep -qvaxE "$plain" /tmp/summary ||
        grep -aE '^(index|(old|new|new file) mode) ' "$patch" | grep -qvaxE "$heads" ||
        ! git apply --whitespace=nowarn {excluded} "${{shadows[@]}}" "$patch"; then
        echo 0 > /logs/verifier/reward.txt
        exit 0
    fi
fi
bash /tests/run.sh > /tmp/tests.log 2>&1
tail -c 20000 /tmp/tests.log
python3 -I -S /tests/grade.py /tmp/tests.log /tests/expected.json > /logs/verifier/reward.txt
"""
_INSTRUCTION = f"""The folder {REPOSITORY} holds a repository. Change it so that the following is settled.

%s

Change the sources, not the tests. There is no network, and nothing has to be installed.
"""
_CONDA = "source /opt/miniconda3/bin/activate\nconda activate testbed\n"
_PARSERS = ("parse_log_pytest", "parse_log_pytest_v2")


class UnusableRowError(ConfigError):
    """A row has all columns, but no task can be made of its values."""


@dataclass(frozen=True)
class DataSet:
    """A published data set.

    Attributes:
        source: Its name on the hub.
        split: Its split.
        columns: Columns that each row has to have.
        parts: The parts that differ from row to row: the name, the image, and the files of the tests.
    """

    source: str
    split: str
    columns: Sequence[str]
    parts: Callable[[Mapping[str, Any]], tuple[str, str, dict[str, str]]]


def task_of_row(kind: str, row: Mapping[str, Any], where: str) -> tuple[str, HarborTask]:
    """Return the name and the content of a row's task.

    Args:
        kind: Name of the data set, of `DATA_SETS`.
        row: The row.
        where: Its place, for errors.

    Raises:
        ConfigError: The row lacks a column, or its name or image is not a plain name.
        UnusableRowError: The value of a column cannot be used.
    """
    data_set = DATA_SETS[kind]
    missing = [name for name in data_set.columns if row.get(name) in (None, "")]
    if missing:
        raise ConfigError(
            f"{where}: it has no {', '.join(missing)}, expected the columns of {data_set.source}: "
            f"{', '.join(data_set.columns)}; take the rows as they are published"
        )
    try:
        name, image, tests = data_set.parts(row)
    except (ConfigError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnusableRowError(f"{where}: {error}; leave the row out, or mend it") from None
    if re.fullmatch(r"[\w.:/@+-]+", image) is None or re.fullmatch(r"[\w.+-]+", name) is None:
        raise ConfigError(f"{where}: {name!r} with the image {image!r}, expected plain names; mend the row")
    excluded = " ".join(f"--exclude={shlex.quote(glob)}" for glob in _excluded())
    script = _TEST.format(repository=REPOSITORY, most=_MOST_PATCH_BYTES, excluded=excluded)
    statement = str(row["problem_statement"])
    if issue := re.search(r"\[ISSUE\](.*)\[/ISSUE\]", statement, re.DOTALL):
        statement = issue[1]
    names = {"modules": sorted(sys.stdlib_module_names), "runners": sorted(RUNNERS), "never": _NEVER}
    return name, HarborTask(
        instruction=_INSTRUCTION % statement.strip(),
        environment={
            "Dockerfile": f"FROM {image}\nCOPY one_commit.sh /var/tmp/one_commit.sh\n"
            f"RUN bash /var/tmp/one_commit.sh && rm /var/tmp/one_commit.sh\nWORKDIR {REPOSITORY}\nENTRYPOINT []\n",
            "one_commit.sh": _ONE_COMMIT,
        },
        tests={
            "Dockerfile": f"FROM {image}\nCOPY . /tests\nWORKDIR {REPOSITORY}\nENTRYPOINT []\n",
            "test.sh": script,
            "grade.py": _GRADE.read_text(encoding="utf-8"),
            "import_places.py": Path(import_places.__file__).read_text(encoding="utf-8"),
            "names.json": json.dumps(names),
            **tests,
        },
        solution=_solution(str(row.get("patch") or "")),
        artifacts=(),  # /logs/artifacts is always taken
        collect=_COLLECT,
        verifier_s=_TESTS_S,
        source={"data_set": data_set.source, "image": image},
    )


def _excluded() -> list[str]:
    """Return globs of git for files that never count, wherever they lie: here `*` matches slashes, too."""
    globs = sorted({glob for each in _NEVER.values() for glob in each})
    return [form for glob in globs for form in (glob, f"*/{glob}", f"{glob}/*", f"*/{glob}/*")]


def _solution(patch: str) -> str:
    if not patch.strip():
        return ""
    ending = "" if patch.endswith("\n") else "\n"
    mark = "END_OF_THE_PATCH"
    return f"#!/bin/bash\nset -e\ncd {REPOSITORY}\ngit apply --whitespace=nowarn - <<'{mark}'\n{patch}{ending}{mark}\n"


def _swe_gym(row: Mapping[str, Any]) -> tuple[str, str, dict[str, str]]:
    """SkyRL's rows of SWE-Gym. Its reward is the exit status of `eval_script`; here the named tests have to pass."""
    name = str(row["instance_id"])
    image = row.get("image_name") or f"docker.io/xingyaoww/sweb.eval.x86_64.{name.replace('__', '_s_')}:latest".lower()
    return name, str(image), {"run.sh": str(row["eval_script"]), "expected.json": _named(row)}


def _swe_rebench(row: Mapping[str, Any]) -> tuple[str, str, dict[str, str]]:
    """Rows of SWE-rebench, whose tests are a patch, and whose command is in `install_config`."""
    name, install = str(row["instance_id"]), row["install_config"]
    if install.get("log_parser") not in _PARSERS:
        raise ConfigError(f"its log parser is {install.get('log_parser')!r}, expected one of {', '.join(_PARSERS)}")
    command = install["test_cmd"]
    command = " ".join(command) if isinstance(command, list) else str(command)
    files = re.findall(r"^\+\+\+ b/(\S+\.py)\s*$", str(row["test_patch"]), re.MULTILINE)
    if not files:
        raise ConfigError("its test_patch changes no Python file")
    run = [
        f"{_CONDA}cd {REPOSITORY}",
        str(install.get("install") or ":"),
        "git apply --whitespace=nowarn /tests/test.patch",
        f"{command} {shlex.join(files)}",
    ]
    image = row.get("docker_image") or f"swerebench/sweb.eval.x86_64.{name.lower().replace('__', '_1776_')}"
    patch = str(row["test_patch"])
    files_of_tests = {"run.sh": "\n".join(run) + "\n", "test.patch": patch if patch.endswith("\n") else f"{patch}\n"}
    return name, str(image), {**files_of_tests, "expected.json": _named(row)}


def _r2e_gym(row: Mapping[str, Any]) -> tuple[str, str, dict[str, str]]:
    """Rows of R2E-Gym, whose image holds the tests, and which name the status of each."""
    name = f"{row['repo_name']}__{str(row['commit_hash'])[:12]}"
    statuses = row["expected_output_json"]
    statuses = json.loads(statuses) if isinstance(statuses, str) else dict(statuses)
    if not statuses:
        raise ConfigError("its expected_output_json names no test")
    run = (
        f"cd {REPOSITORY}\n"
        "for each in /r2e_tests /root/r2e_tests; do\n"
        "    if [ -d $each ] && [ ! -e r2e_tests ]; then ln -s $each r2e_tests; fi\n"
        "done\n"
        "for each in run_tests.sh /root/run_tests.sh /r2e_tests/run_tests.sh; do\n"
        "    if [ -f $each ]; then exec bash $each; fi\n"
        "done\n"
        "exec .venv/bin/python -W ignore -m pytest -rA r2e_tests\n"
    )
    expected = json.dumps({"form": "summary", "statuses": statuses}, ensure_ascii=False)
    return name, str(row["docker_image"]), {"run.sh": run, "expected.json": expected}


def _named(row: Mapping[str, Any]) -> str:
    """Return the expectation of rows as in SWE-bench: these tests pass. A name ends at its first space, as in logs."""
    names = [name for key in ("FAIL_TO_PASS", "PASS_TO_PASS") for name in _names(row.get(key))]
    if not _names(row.get("FAIL_TO_PASS")):
        raise ConfigError("its FAIL_TO_PASS names no test")
    passed = list(dict.fromkeys(name.split()[0] for name in names))
    return json.dumps({"form": "names", "passed": passed}, ensure_ascii=False)


def _names(value: Any) -> list[str]:
    if value is None or isinstance(value, str):
        value = json.loads(value) if value and value.strip() else []
    return [str(name) for name in value if str(name).strip()]


_OF_ALL = ("problem_statement",)
DATA_SETS = {
    "swe_gym": DataSet(
        "SumanthRH/SWE-Gym-Subset", "train", ("instance_id", *_OF_ALL, "eval_script", "FAIL_TO_PASS"), _swe_gym
    ),
    "r2e_gym": DataSet(
        "R2E-Gym/R2E-Gym-Subset",
        "train",
        ("repo_name", "commit_hash", *_OF_ALL, "docker_image", "expected_output_json"),
        _r2e_gym,
    ),
    "swe_rebench": DataSet(
        "nebius/SWE-rebench",
        "filtered",
        ("instance_id", *_OF_ALL, "test_patch", "install_config", "FAIL_TO_PASS"),
        _swe_rebench,
    ),
}
"""The data sets by the name that `recipes/swe/prepare_harbor.py` takes."""
