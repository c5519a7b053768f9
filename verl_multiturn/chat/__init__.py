"""From messages to token ids and back: chat templates, the control-token firewall, and the reading of tool calls."""
