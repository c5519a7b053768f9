"""Bridges to agent programs and to other projects' harnesses."""
