"""A server of live sessions: an endpoint for agents, rewards that come later, and new weights while it serves."""
