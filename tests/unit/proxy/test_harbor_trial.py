"""The bridge's actions in Harbor's Python, with stand-ins for Harbor: `scripts/harbor.sh` has Harbor itself."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
from openai import BadRequestError
from openai.types.chat import ChatCompletion

from verl_multiturn.harnesses.harbor.trials.end_cause import TrialEvents
from verl_multiturn.harnesses.mini_swe import play

pytest.importorskip("minisweagent")

_STAND_INS = (
    *("harbor", "harbor.agents", "harbor.agents.base", "harbor.agents.terminus_2", "harbor.environments"),
    *("harbor.environments.base", "harbor.environments.capabilities", "harbor.environments.docker"),
    *("harbor.environments.docker.docker", "harbor.environments.tar_transfer", "harbor.models"),
    *("harbor.models.agent", "harbor.models.agent.context", "harbor.models.environment_type", "harbor.models.task"),
    *("harbor.models.task.config", "harbor.models.trial", "harbor.models.trial.config", "harbor.trial"),
    *("harbor.trial.hooks", "harbor.trial.single_step", "harbor.trial.trial", "litellm"),
)


class Environment:
    """Harbor's base of environments."""

    def __init__(self, environment_dir: Path, task_env_config: Any) -> None:
        self.environment_dir, self.task_env_config = environment_dir, task_env_config
        self._effective_memory_mb = self._effective_storage_mb = None
        self._validate_definition()

    def _validate_definition(self) -> None:
        """Read the definition."""

    def _mount_targets(self) -> list[str]:
        return []

    def _merge_env(self, env: dict[str, str] | None) -> dict[str, str] | None:
        return env


class Containers:
    """Harbor's environment of a container engine; `auto_mounting` so that none is killed."""

    auto_mounting = True
    session_id = "session"

    @staticmethod
    def runtime() -> Any:
        """Return how the engine is called."""
        return SimpleNamespace(engine=["docker"])

    async def start(self) -> None:
        """Start."""

    async def stop(self) -> None:
        """Stop all services."""

    async def stop_service(self, service: str) -> None:
        """Stop a service."""


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Return the bridge's modules that import Harbor."""
    for name in _STAND_INS:
        monkeypatch.setitem(sys.modules, name, MagicMock())
    for name in ("MSWEA_SILENT_STARTUP", "MSWEA_GLOBAL_CONFIG_DIR", "LITELLM_LOCAL_MODEL_COST_MAP"):
        monkeypatch.setenv(name, "1")
    sys.modules["harbor.environments.base"].BaseEnvironment = Environment  # type: ignore[attr-defined]
    sys.modules["harbor.environments.docker.docker"].DockerEnvironment = Containers  # type: ignore[attr-defined]
    sys.modules["harbor.agents.base"].BaseAgent = object  # type: ignore[attr-defined]
    found = {}
    for name in ("trials.trial", "trials.environment", "mini_swe"):
        spec = importlib.util.find_spec(f"verl_multiturn.harnesses.harbor.{name}")
        assert spec is not None
        assert spec.loader is not None
        module = found[name.rpartition(".")[2]] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return found


@pytest.mark.parametrize(("given", "longest"), [({}, 86_400.0), ({"longest_timeout_s": 3_000.0}, 3_000.0)])
async def test_tests_have_the_seconds_of_their_task(
    modules: dict[str, ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, float],
    longest: float,
) -> None:
    """Harbor names none for the tests, and ends them itself."""
    asked: list[float | None] = []

    async def run(command: str, timeout_s: float | None = None, **_: Any) -> Any:
        asked.append(timeout_s)
        return SimpleNamespace(output="", exit_code=0, timed_out=False, stopped=None)

    async def opened() -> Any:
        return SimpleNamespace(run=run)

    monkeypatch.setattr(modules["environment"], "WorkspacePool", lambda settings: SimpleNamespace(open=opened))
    config = SimpleNamespace(docker_image=None, workdir=None)
    environment = modules["environment"].WorkspaceEnvironment(tmp_path, config, workspace=given)
    await environment.start(False)
    asked.clear()
    await environment.exec("bash /tests/test.sh")
    await environment.exec("ls", timeout_sec=5)
    assert asked == [longest, 5.0]


async def test_a_control_leaves_the_trials_files(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    trial, played = modules["trial"], []

    async def story(config: Any, *_: Any) -> TrialEvents:
        folder = config.trials_dir / config.trial_name
        folder.mkdir(parents=True)
        (folder / "verifier.log").write_text(str(config.agent.name))
        played.append(folder.relative_to(tmp_path))
        return TrialEvents("verifier", error="no reward")

    class Agent(SimpleNamespace):
        """The harness of a trial."""

    def config() -> Any:
        made = SimpleNamespace(trials_dir=tmp_path, trial_name="t", agent=Agent(name="mini"))
        made.model_copy = lambda deep: config()
        return made

    trial._story, trial.trial_config = story, lambda *_: config()
    end = await trial.judge({"settings": {"keep_trials": str(tmp_path)}}, {}, None)
    assert (end.kind, [str(folder) for folder in played]) == ("unjudged", ["t", "t/control/t"])
    assert [(tmp_path / folder / "verifier.log").read_text() for folder in played] == ["mini", "nop"]
    played.clear()
    trial.shutil.rmtree(tmp_path / "t")
    await trial.judge({"settings": {"keep_trials": None}}, {}, None)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("states", "lost"),
    [
        (("", "outside"), ""),  # Harbor has stopped it before it collects from other services
        (("outside", "outside"), "outside"),
        (("inside", ""), "inside"),
        ((None, "outside"), "outside"),  # no other service
    ],
)
async def test_who_ended_a_container_is_asked_before_harbor_ends_it(
    modules: dict[str, ModuleType], states: tuple[str | None, str], lost: str
) -> None:
    trial, state = modules["trial"], {"lost": ""}
    trial.lost_container = lambda *_: state["lost"]
    environment = Containers()
    before = (Containers.start, Containers.stop, Containers.stop_service)
    watch = trial._TrialLog()
    watch.follow(MagicMock(agent_environment=environment), None)
    collecting, stopping = states
    if collecting is not None:
        state["lost"] = collecting
        await environment.stop_service("main")
    state["lost"] = stopping
    await environment.stop()
    watch.release()
    assert watch.agent_lost == lost
    assert (Containers.start, Containers.stop, Containers.stop_service) == before


class HarborEnvironment:
    """An environment of Harbor that runs two commands, and whose other ones fail at once or late."""

    def __init__(self) -> None:
        self.commands: list[str] = []

    async def exec(self, command: str, env: dict[str, str], timeout_sec: int) -> Any:
        """Run a command."""
        self.commands.append(command)
        assert env["PAGER"] == "cat"
        if command == "gone":
            raise RuntimeError("the container is gone")
        if command == "late":
            await asyncio.sleep(timeout_sec)
            raise RuntimeError("Harbor's own words")
        return SimpleNamespace(stdout="so\n", stderr="far\n", return_code=3)


def scripted(*commands: str) -> Any:
    """Return a client of OpenAI's form whose model gives some commands, and then reports that its context is full."""
    left = list(commands)

    def create(**_: Any) -> ChatCompletion:
        if not left:
            request = httpx.Request("POST", "http://127.0.0.1")
            response = httpx.Response(400, request=request, json={})
            raise BadRequestError("full", response=response, body={"code": "context_length_exceeded"})
        call = {"name": "bash", "arguments": json.dumps({"command": left.pop(0)})}
        calls = [{"id": "c", "type": "function", "function": call}]
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        choice = {"index": 0, "finish_reason": "tool_calls", "message": message}
        return ChatCompletion.model_validate(
            {"id": "c", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        )

    return contextlib.nullcontext(SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create))))


async def _worked(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, *commands: str) -> list[Any]:
    module, said = modules["mini_swe"], []
    monkeypatch.setattr(module, "client_of", lambda *address: scripted(*commands))
    monkeypatch.setattr(module, "play", lambda *given: said.extend(play(*given)))
    harness = module.MiniSweAgent(command_s=1.0)
    harness._get_env = lambda name: name
    environment = HarborEnvironment()
    await harness.run("Mend it.", environment, None)
    assert environment.commands == list(commands)
    return said


async def test_commands_of_mini_swe_agent_run_in_harbors_environment(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = await _worked(modules, monkeypatch, "ls", "late")
    assert [each["role"] for each in said] == ["system", "user", "assistant", "tool", "assistant", "tool", "exit"]
    assert ('"returncode": 3' in said[3]["content"], "so\\nfar" in said[3]["content"]) == (True, True)
    assert "did not end within 1 seconds" in said[5]["content"]
    assert (said[-1]["extra"]["exit_status"], said[-1]["content"]) == ("LimitsExceeded", "context_length_exceeded")


async def test_a_lost_environment_ends_mini_swe_agent(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="the container is gone"):
        await _worked(modules, monkeypatch, "gone")


def test_no_command_of_mini_swe_agent_runs_behind_its_time(modules: dict[str, ModuleType]) -> None:
    inside = modules["mini_swe"]._Inside(HarborEnvironment(), MagicMock())
    inside.is_over = True
    with pytest.raises(RuntimeError, match="the agent's time is over"):
        inside.run("ls", timeout_s=1.0, env={})
