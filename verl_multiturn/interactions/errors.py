"""`EnvironmentFailedError`: what the interactions in the box raise when their endpoint, server or process fails.

Where nobody can have caused it, they raise the class `EnvironmentOutageError`: what an action of the model may bring
about, such as an error of the environment's own code or the end of its server, is no outage. An answer that is late is
an `EnvironmentLateError`, for which `limits.outage.timeouts` says it.

`LlmUser`, `PolicyUser`, `StepEnv` and `OpenEnvClient` raise it, also when the environment itself raised an error in its
process. The runtime then does what it does for every error of an interaction's method: the conversation ends with the
stop reason `environment_error`, and is invalid.
"""

from __future__ import annotations

from verl_multiturn.errors import MultiTurnError, OutageError


class EnvironmentFailedError(MultiTurnError, RuntimeError):
    """A simulated user or an environment broke off: its endpoint, server or process failed.

    It says nothing about the model, so the conversation ends and is marked as invalid.
    """


class EnvironmentOutageError(EnvironmentFailedError, OutageError):
    """An endpoint or a server is not there, or no process can be had."""


class EnvironmentLateError(EnvironmentOutageError, TimeoutError):
    """An endpoint or a server was late; the limits say whether what the model wrote may be the reason."""
