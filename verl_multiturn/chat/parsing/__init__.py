"""What the model wrote, as text and tool calls."""
