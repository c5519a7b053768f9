"""`EnvironmentFailedError`: raised by the interactions in the box when their endpoint, server or process fails.

Where the model cannot have caused it, they raise the class `EnvironmentOutageError`: a failure that an action of the
model may cause, such as an error of the environment's own code or the end of its server, is not an outage. An answer
that is late is an `EnvironmentLateError`, for which `limits.outage.timeouts` decides.

`LlmUser`, `PolicyUser`, `StepEnv` and `OpenEnvClient` raise it, also when the environment itself raised an error in its
process. The runtime then acts as for every error of an interaction's method: the conversation ends with the
stop reason `environment_error`, and is invalid.
"""

from __future__ import annotations

from verl_multiturn.errors import MultiTurnError, OutageError


class EnvironmentFailedError(MultiTurnError, RuntimeError):
    """A simulated user or an environment broke off: its endpoint, server or process failed.

    It shows nothing about the model, so the conversation ends and is marked as invalid.
    """


class EnvironmentOutageError(EnvironmentFailedError, OutageError):
    """An endpoint or a server is not there, or no process can be had."""


class EnvironmentLateError(EnvironmentOutageError, TimeoutError):
    """An endpoint or a server was late; the limits decide whether the model's text may be the reason."""
