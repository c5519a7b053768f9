"""Tasks in Harbor's form without Harbor: read, refused and checked ones, and the tool over them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import pytest

from verl_multiturn.errors import ConfigError, UnjudgedError
from verl_multiturn.harnesses.harbor.tasks.check import check_folders
from verl_multiturn.harnesses.harbor.tasks.folder import folders_below, read_folder
from verl_multiturn.harnesses.harbor.tasks.tool import TaskBash
from verl_multiturn.harnesses.harbor.tasks.write import HarborTask, write_folder
from verl_multiturn.verdicts.task import UnguardedError
from verl_multiturn.workspaces.settings import WorkspaceSettings

SMALL = WorkspaceSettings(timeout_s=60, pool=0, memory_mb=256, disk_mb=8)
DOCKERFILE = "FROM scratch\nWORKDIR /app\nENV WORD=two\nCOPY a.txt b.txt\nCOPY a.txt sub/\nCOPY src .\n"
HONEST = """#!/bin/bash
[ "$(cat /app/answer.txt)" = $WORD ] && right=1 || right=0
echo $right > /logs/verifier/reward.txt
"""
SAYS_SO = ("[agent]", "[metadata]\nunguarded = true\n\n[agent]")


def written(
    dockerfile: str = DOCKERFILE.replace("COPY a.txt sub/\n", ""),
    tests: Mapping[str, str] | None = None,
    solution: str = "#!/bin/bash\necho $WORD > /app/answer.txt\n",
    artifacts: tuple[str, ...] = ("/app/answer.txt",),
) -> HarborTask:
    files = {"Dockerfile": dockerfile, "a.txt": "one\n", "src/run.sh": "#!/bin/bash\necho ran\n"}
    return HarborTask("Say two.", files, tests or {"test.sh": HONEST}, solution, artifacts)


def made(path: Path, task: HarborTask | None = None, replaced: tuple[str, str] = ("", "")) -> Path:
    write_folder(path, task or written())
    settings = path / "task.toml"
    settings.write_text(settings.read_text().replace(*replaced) if replaced[0] else settings.read_text())
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = read_folder(made(tmp_path / "t"))
    assert folder.instruction == "Say two."
    files, executable = folder.task.tree()
    assert files == {"b.txt": b"one\n", "run.sh": b"#!/bin/bash\necho ran\n"}
    assert executable == {"run.sh"}
    assert folder.task.allowed == ("answer.txt", "answer.txt/**/*")
    assert (folder.task.variables, folder.task.timeout_s) == ({"WORD": "two"}, 600.0)
    assert list(folder.solution) == ["solve.sh"]
    assert folders_below(tmp_path) == [tmp_path / "t"] == folders_below(tmp_path / "t")
    made(tmp_path / "exported" / "set" / "t")
    with pytest.raises(ConfigError, match=f"name {str(tmp_path / 'exported' / 'set')!r}$"):
        folders_below(tmp_path / "exported")


def test_files_are_copied_as_docker_does(tmp_path: Path) -> None:
    dockerfile = "FROM made:1\nWORKDIR /app\nCOPY src sub\nCOPY a.txt ."
    folder = read_folder(made(tmp_path / "t", written(dockerfile, artifacts=())), bases=["made:1"])
    assert sorted(folder.task.tree()[0]) == ["a.txt", "sub/run.sh"]
    assert folder.task.allowed == ("**/*",)


@pytest.mark.parametrize(
    ("dockerfile", "said"),
    [
        ("FROM ubuntu:24.04\n", "its Dockerfile says 'FROM ubuntu:24.04'"),
        ("FROM scratch\nRUN make\n", "its Dockerfile says 'RUN make'"),
        ("FROM scratch\nENV PATH=/x:$PATH\n", r"its Dockerfile says 'ENV PATH=/x:\$PATH'"),
        ("FROM scratch\nWORKDIR /root\n", "its commands start in '/root'"),
        ("FROM scratch\nCOPY a.txt /etc/a\n", "its Dockerfile copies 'a.txt' to '/etc/a'"),
        ("FROM scratch\nCOPY none.txt /app/\n", "its Dockerfile copies 'none.txt', which is not in"),
        (DOCKERFILE, "its Dockerfile copies 'a.txt' twice"),
    ],
)
def test_what_needs_an_image_is_refused_by_name(tmp_path: Path, dockerfile: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"the task '.*/t': .*{said}"):
        read_folder(made(tmp_path / "t", written(dockerfile)))


@pytest.mark.parametrize(
    ("replaced", "said"),
    [
        (("[environment]\n", "[environment]\ndocker_image = 'x:1'\n"), "its image is 'x:1'"),
        (("[environment]\n", "[environment]\nenv = {A = '${B}'}\n"), "takes 'A' from the host"),
        (("[environment]\n", "[environment]\nhealthcheck = {command = 'true'}\n"), "'environment.healthcheck'"),
        (("[verifier]\n", "[verifier]\nenv = {KEY = 'x'}\n"), "'verifier.env'"),
        (("timeout_sec = 600.0", "timeout_sec = 7200.0"), "its tests may take 7200 s, and here at most 900"),
        (('"/app/answer.txt"', '"/etc/x"'), "its artifact '/etc/x' does not lie below '/app'"),
        (("[environment]\n", "[environment]\ngpus = 1\n"), "'environment.gpus'"),
        (("[verifier]\ntimeout_sec", "[verifier]\ntimeout_secs"), "has 'verifier.timeout_secs', .*timeout_sec, user"),
        (("[environment]\n", "[enviroment]\n"), "has 'enviroment', .*environment"),
        (("schema_version", "schema version"), "cannot be read"),
        (('schema_version = "1.4"', "verifier = 5"), "cannot be read"),
        (("timeout_sec = 600.0", "timeout_sec = [1]"), "cannot be read"),
    ],
)
def test_settings_that_a_workspace_has_not_are_refused(tmp_path: Path, replaced: tuple[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)the task '.*/t'.*{said}.*; "):
        read_folder(made(tmp_path / "t", replaced=replaced))


def test_settings_that_ask_for_nothing_are_taken(tmp_path: Path) -> None:
    asked = "[environment]\ngpus = 0\nos = 'linux'\ncpus = 2\nmemory = '2G'\nmcp_servers = []\n"
    assert read_folder(made(tmp_path / "t", replaced=("[environment]\n", asked))).task.name == "t"


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("tests/kept", "'tests/kept' is a link"),
        ("solution/kept", "'solution/kept' is a link"),
        ("instruction.md", "'instruction.md' is a link"),
        ("tests", "'tests' is a link"),
        ("environment/Dockerfile", "'environment/Dockerfile' is a link"),
        ("environment/src", "its Dockerfile copies 'src/kept.txt', which a link leads out"),
        ("environment/src/kept.txt", "its Dockerfile copies 'src/kept.txt', which a link leads out"),
    ],
)
def test_no_link_leads_to_a_file_of_the_host(tmp_path: Path, link: str, said: str) -> None:
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "kept.txt").write_text("FROM scratch")
    path = made(tmp_path / "t", written("FROM scratch\nCOPY src/kept.txt .\n"))
    (path / "environment" / "src" / "kept.txt").write_text("")
    at = path / link
    if at.is_dir():
        at.rename(tmp_path / "away")
    at.unlink(missing_ok=True)
    at.symlink_to(tmp_path / "host" / ("kept.txt" if at.suffix or at.name in ("kept", "Dockerfile") else ""))
    with pytest.raises(ConfigError, match=said):
        read_folder(path)


def test_a_path_from_the_root_is_one_beside_the_dockerfile(tmp_path: Path) -> None:
    folder = read_folder(made(tmp_path / "t", written("FROM scratch\nCOPY /a.txt /app/b.txt\n")))
    assert folder.task.tree()[0] == {"b.txt": b"one\n"}
    with pytest.raises(ConfigError, match=r"its Dockerfile copies 'etc/hostname', which is not in"):
        read_folder(made(tmp_path / "t", written("FROM scratch\nCOPY /etc/hostname /app/b.txt\n")))


@pytest.mark.parametrize("name", ["tests/large", "solution/large", "instruction.md", "task.toml", "environment/a.txt"])
def test_a_file_that_is_too_large_is_never_read(tmp_path: Path, name: str) -> None:
    path = made(tmp_path / "t")
    with (path / name).open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=r"has 1099511627776 bytes|more than 67108864 bytes"):
        read_folder(path).task.tree()


def test_a_folder_that_is_no_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no task in Harbor's form"):
        folders_below(tmp_path)
    path = made(tmp_path / "t", written(tests={"test.sh": HONEST, "Dockerfile": "FROM x"}))
    with pytest.raises(ConfigError, match="its tests have an image of their own"):
        read_folder(path)
    (path / "tests" / "test.sh").unlink()
    (path / "tests" / "Dockerfile").unlink()
    with pytest.raises(ConfigError, match=r"tests/test\.sh is not there"):
        read_folder(path)


async def test_only_tasks_whose_solution_is_paid_are_used(tmp_path: Path) -> None:
    always = HONEST.replace("right=0", "right=1")
    starts = HONEST.replace("$(cat /app/answer.txt)", "$(bash /app/answer.txt)")
    echoes = "#!/bin/bash\necho echo $WORD > /app/answer.txt\n"
    paths = [
        made(tmp_path / "good"),
        made(tmp_path / "wrong", written(solution="#!/bin/bash\necho three > /app/answer.txt\n")),
        made(tmp_path / "fails", written(solution="#!/bin/bash\nexit 3\n")),
        made(tmp_path / "always", written(tests={"test.sh": always})),
        made(tmp_path / "none", written(solution="")),
        made(tmp_path / "starts", written(tests={"test.sh": starts}, solution=echoes)),
        made(tmp_path / "says so", written(tests={"test.sh": starts}, solution=echoes), SAYS_SO),
    ]
    checked, refused = await check_folders(paths, SMALL)
    assert [(path.name, task.guard) for path, (_, task) in checked.items()] == [
        ("good", "reads files only"),
        ("says so", ""),
    ]
    assert {path.name: why.partition("; leave")[0].rpartition("': ")[2] for path, why in refused.items()} == {
        "wrong": "the repair is paid 0, and the untouched tree 0; expected 1 and less",
        "fails": "its solution fails: exit status 3: ",
        "always": "the repair is paid 1, and the untouched tree 1; expected 1 and less",
        "none": refused[paths[4]].partition("; leave")[0].rpartition("': ")[2],
        "starts": "test.sh has no twins, and starts 'answer.txt', which may be changed: a canary there wrote the "
        "reward; compare with literals in a Python test of /tests, let test.sh read only files that are no "
        "programs, or write 'unguarded: true' into the verdict",
    }
    assert "has no solution/solve.sh" in refused[paths[4]]


async def test_the_tool_works_in_the_tree_and_earns_the_verdict(tmp_path: Path) -> None:
    folder = read_folder(made(tmp_path / "t"))
    reads = folder.task.model_copy(update={"verdict": folder.task.verdict.model_copy(update={"reads_only": True})})
    tool = TaskBash({"timeout_s": 60, "pool": 0, "memory_mb": 256, "disk_mb": 8})
    paid = {}
    try:
        for name, command in {
            "right": "echo $WORD > answer.txt",
            "wrong": "echo three > answer.txt",
            "writes the reward": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
            "ends it": "kill -9 -1",
        }.items():
            await tool.create(name, task=reads.model_dump_json())
            assert (await tool.execute(name, {"command": "pwd; ls"})).text == "/tmp/workspace\nb.txt\nrun.sh\n"
            with contextlib.suppress(ValueError):  # the workspace ended
                await tool.execute(name, {"command": command})
            paid[name] = await tool.calc_reward(name)
            await tool.release(name)
        assert paid == {"right": 1.0, "wrong": 0.0, "writes the reward": 0.0, "ends it": 0.0}
        with pytest.raises(UnguardedError, match=r"task 't': its script has no twins, .* use what check_task returns"):
            await tool.create("never checked", task=folder.task.model_dump_json())
        silent = reads.verdict.model_copy(update={"files": {"test.sh": ""}})
        broken = reads.model_copy(update={"verdict": silent})
        await tool.create("broken", task=broken.model_dump_json())
        with pytest.raises(UnjudgedError, match="its untouched tree cannot be judged either"):
            await tool.calc_reward("broken")
        with pytest.raises(ConfigError, match=r"create_kwargs\.task: None, expected a Task as JSON"):
            await tool.create("none")
    finally:
        await tool.aclose()
