"""The settings of an MCP server, in messages and before anything is sent."""

import pytest

from verl_multiturn import ConfigError
from verl_multiturn.tools.services.mcp_settings import McpSettings, check_settings


@pytest.mark.parametrize(
    ("url", "label"),
    [
        ("https://me:secret@host:8000/mcp?key=secret", "'https://host:8000/mcp'"),
        ("https://${KEY}@host/a@b", "'https://host/a@b'"),
        ("https://host/mcp", "'https://host/mcp'"),
    ],
)
def test_messages_name_no_user_and_no_password(url: str, label: str) -> None:
    assert McpSettings(url=url).label == label


@pytest.mark.parametrize("value", ["secret\n", "se\ncret", " secret", "sécret", "secret\x7f"])
def test_what_no_header_can_hold_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MCP_KEY", value)
    with pytest.raises(ConfigError) as caught:
        check_settings(McpSettings(url="http://127.0.0.1:9/mcp", headers={"x-key": "${MCP_KEY}"}), "tools.yaml: mcp")
    said = str(caught.value)
    assert said.startswith("tools.yaml: mcp.headers.x-key: it holds something that no header can hold")
    assert "cret" not in said


def test_a_header_may_hold_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_KEY", "a-key.1/2+3==")
    check_settings(
        McpSettings(url="http://127.0.0.1:9/mcp", headers={"authorization": "Bearer ${MCP_KEY}"}), "tools.yaml: mcp"
    )
