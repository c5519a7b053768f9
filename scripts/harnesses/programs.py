"""The programs: where each is installed, how it is pointed to an endpoint, and how it is started."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.harnesses import policies
from scripts.harnesses.environments import Environment
from scripts.harnesses.policies import TASK, Policy

DRIVERS = Path(__file__).parent / "drivers"


@dataclass(frozen=True)
class Endpoint:
    """Address and key of a session."""

    root: str
    """Such as `http://127.0.0.1:4711`; OpenAI's clients take it with `/v1`, Anthropic's without."""
    key: str

    @property
    def openai(self) -> str:
        """Base URL for OpenAI's clients."""
        return f"{self.root}/v1"

    @property
    def variables(self) -> dict[str, str]:
        """The four variables that a `command` agent of the proxy gets, too."""
        return {
            "OPENAI_BASE_URL": self.openai,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.root,
            "ANTHROPIC_API_KEY": self.key,
        }


Setup = Callable[[Path, Endpoint], Mapping[str, str]]
"""Writes a program's settings below its home folder, and returns further variables of its environment."""


def _nothing(home: Path, endpoint: Endpoint) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True)
class Program:
    """A program in one way of using it."""

    name: str
    """Family and variant, such as `smolagents.code`."""
    environment: Environment
    command: Sequence[str]
    """The program, which is looked for in the environment first, and its arguments."""
    policy: Policy
    setup: Setup = _nothing
    variables: Mapping[str, str] = field(default_factory=dict)
    padding: int = 0
    """Lines that follow the lot number in the file, for a program that is to come to its context limit."""

    @property
    def family(self) -> str:
        """The program, without the way of using it."""
        return self.name.partition(".")[0]

    def environ(self, home: Path, endpoint: Endpoint) -> dict[str, str]:
        """Return the whole environment of the process; writes the program's settings below `home`."""
        kept = {name: os.environ[name] for name in ("LANG", "TERM", "SSL_CERT_FILE") if name in os.environ}
        own = {
            "PATH": f"{self.environment.programs}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(home),
            "TMPDIR": str(home),
            "XDG_CONFIG_HOME": str(home / ".config"),
            "XDG_DATA_HOME": str(home / ".local/share"),
            "XDG_CACHE_HOME": str(home / ".cache"),
            "XDG_STATE_HOME": str(home / ".local/state"),
            "DO_NOT_TRACK": "1",
            "NO_PROXY": "127.0.0.1",
        }
        return {**kept, **own, **endpoint.variables, **self.variables, **self.setup(home, endpoint)}


def _python(name: str, policy: Policy, driver: str, *arguments: str, **variables: str) -> Program:
    """Return a driver of ours, run by the Python of the environment."""
    command = ["python", str(DRIVERS / f"{driver}.py"), *arguments]
    return Program(name, Environment(name.partition(".")[0]), command, policy, variables=variables)


def _ai_sdk(name: str) -> Program:
    """Return a driver of ours, run by Node with the packages of the environment."""
    environment = Environment("ai_sdk", "ai@6.0.326 @ai-sdk/openai@3.0.141 @ai-sdk/openai-compatible@2.0.92")
    command = ["node", str(DRIVERS / "ai_sdk.cjs"), name]

    def found(home: Path, endpoint: Endpoint) -> dict[str, str]:
        return {"NODE_PATH": str(environment.path / "node_modules")}

    policy = policies.second_looker("read_file", name=policies.FILE)
    return Program(f"ai_sdk.{name}", environment, command, policy, found)


def _codex(home: Path, endpoint: Endpoint) -> dict[str, str]:
    """Name the provider and the limit at which the conversation is summed up."""
    folder = home / ".codex"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(
        f"""\
model = "policy"
model_provider = "here"
model_context_window = 32768
model_auto_compact_token_limit = {CODEX_LIMIT}
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.here]
name = "here"
base_url = "{endpoint.openai}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
""",
        encoding="utf-8",
    )
    return {"CODEX_HOME": str(folder)}


def _opencode(home: Path, endpoint: Endpoint) -> dict[str, str]:
    """Name the provider; nothing is updated, shared or fetched."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
        "models": {"policy": {"name": "policy"}},
    }
    settings = {"provider": {"here": provider}, "autoupdate": False, "share": "disabled"}
    (home / "opencode.json").write_text(json.dumps(settings), encoding="utf-8")
    return {"OPENCODE_CONFIG": str(home / "opencode.json"), "OPENCODE_DISABLE_MODELS_FETCH": "1"}


def _qwen_code(home: Path, endpoint: Endpoint) -> dict[str, str]:
    """Turn updates and statistics off."""
    folder = home / ".qwen"
    folder.mkdir(parents=True)
    general = {"general": {"enableAutoUpdate": False}, "privacy": {"usageStatisticsEnabled": False}}
    (folder / "settings.json").write_text(json.dumps({**general, "telemetry": {"enabled": False}}), encoding="utf-8")
    return {"OPENAI_MODEL": "policy"}


CODEX_LIMIT = 7_600

PROGRAMS: Sequence[Program] = (
    _python("openai_sdk", policies.openai_sdk, "openai_sdk"),
    _python("openai_agents.responses", policies.openai_agents, "openai_agents", "responses"),
    _python("openai_agents.chat", policies.openai_agents, "openai_agents", "chat"),
    _python("langgraph", policies.reader("read_file", name=policies.FILE), "langgraph_graph"),
    _python("pydantic_ai.openai", policies.reader("read_file", name=policies.FILE), "pydantic_agent", "openai"),
    _python("pydantic_ai.anthropic", policies.reader("read_file", name=policies.FILE), "pydantic_agent", "anthropic"),
    _python("smolagents.code", policies.smolagents_code, "smolagents_agent", "code"),
    _python("smolagents.tools", policies.smolagents_tools, "smolagents_agent", "tools"),
    Program(
        "mini_swe_agent",
        Environment("mini_swe_agent"),
        ["mini", "-m", "openai/policy", "-t", TASK, "--yolo", "--exit-immediately"],
        policies.mini_swe_agent,
        variables={
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    ),
    Program(
        "claude_code",
        Environment("claude_code", "@anthropic-ai/claude-code@2.1.197"),
        ["claude", "-p", TASK, "--model", "policy", "--allowedTools", "Bash,Agent"],
        policies.claude_code,
        variables={
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
        },
    ),
    Program(
        "codex",
        Environment("codex", "@openai/codex@0.169.0"),
        ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK],
        policies.codex,
        _codex,
        padding=200,
    ),
    Program(
        "opencode",
        Environment("opencode", "opencode-ai@1.18.33"),
        ["opencode", "run", "--model", "here/policy", TASK],
        policies.reader("bash", command=f"cat {policies.FILE}", description="Read a file"),
        _opencode,
    ),
    Program(
        "qwen_code",
        Environment("qwen_code", "@qwen-code/qwen-code@0.15.10"),
        ["qwen", "--auth-type", "openai", "--yolo", "-p", TASK],
        policies.reader("run_shell_command", command=f"cat {policies.FILE}", description="Read", is_background=False),
        _qwen_code,
    ),
    _python("agno.chat", policies.second_looker("read_file", name=policies.FILE), "agno_agent", "chat"),
    _python("agno.responses", policies.second_looker("read_file", name=policies.FILE), "agno_agent", "responses"),
    _python(
        "crewai",
        policies.reader("read_file", name=policies.FILE),
        "crewai_crew",
        CREWAI_DISABLE_TELEMETRY="true",
        CREWAI_TRACING_ENABLED="false",
        OTEL_SDK_DISABLED="true",
    ),
    _python(
        "google_adk",
        policies.reader("read_file", name=policies.FILE),
        "google_adk_agent",
        LITELLM_LOCAL_MODEL_COST_MAP="True",
        OTEL_SDK_DISABLED="true",
    ),
    _python("strands", policies.reader("read_file", name=policies.FILE), "strands_agent", OTEL_SDK_DISABLED="true"),
    _ai_sdk("compatible"),
    _ai_sdk("chat"),
    _ai_sdk("responses"),
)
