"""The tree of this package's public errors.

`ConfigError` and the errors about a contract are mistakes of an author and may end a run. A fault of a model, a tool,
an agent or a network never raises out of a conversation: it ends the conversation with a `StopReason`.

    MultiTurnError
    ├── ConfigError          a setting, a tool YAML, a schema or a data row that cannot work
    │   ├── RewardContractError     a reward function returned something that is not a reward
    │   │   └── TeacherContractError    a teacher's answer is not the log-probs of the row's tokens
    │   └── UnguardedError          a row whose tests pay code that knows nothing, in `verdicts/task.py`
    ├── ToolContractError    a tool's code broke the `BaseTool` contract (for example: returned the wrong type)
    ├── InteractionContractError   an interaction's code broke the `Interaction` contract
    ├── AgentContractError   an agent behind the endpoint returned something that is not a reward
    ├── AdvantageContractError   a function of advantages raised, or returned values that are not advantages
    ├── EngineError          the generation engine failed, or returned something that is not a generation
    ├── OutageError          a service that a tool, an interaction or an agent needs is down
    │   ├── UnavailableError        an HTTP service, in `tools/services/http_client.py`
    │   ├── SandboxError            the sandbox itself failed, not the code in it, in `sandbox/launch.py`
    │   ├── EndpointError           the endpoint of a judge or a simulated user, in `chat_endpoint.py`
    │   └── EnvironmentOutageError  an environment's server or process, in `interactions/errors.py`
    ├── UnjudgedError        a model's work cannot be scored, for a cause of ours
    │   └── TruthError              no answer can be scored with this ground truth, in `rewards/score.py`
    ├── WorkspaceError       a program in a workspace has ended it, in `workspaces/workspace.py`
    ├── ServiceFailedError   an HTTP service failed at one request, in `tools/services/http_client.py`
    ├── TrajectoryError      an append that would break a rule of `Trajectory`
    └── CertificateError     a batch or a record differs from the engine's output, or cannot be verified

Errors of single modules, such as `WorkerError` of `processes/pool.py`, are not in the tree.
"""


class MultiTurnError(Exception):
    """The root of this package's errors."""


class ConfigError(MultiTurnError, ValueError):
    """A setting, a tool YAML, a schema or a data row that cannot work."""


class RewardContractError(ConfigError):
    """A reward function made a mistake: it returned something that is not a reward, or raised `ConfigError`.

    It ends a run and an evaluation: no conversation could be trusted to have its reward. So does a batch of which no
    group is left, since conversations raised.
    """


class TeacherContractError(RewardContractError):
    """A teacher (verl's distillation) answered with something that is not the log-probs of the row's tokens.

    It ends a run, as a mistake of the reward function does: nothing could be learned from any row.
    """


class ToolContractError(MultiTurnError, TypeError):
    """A tool's code broke the `BaseTool` contract."""


class InteractionContractError(MultiTurnError, TypeError):
    """An interaction's code broke the `Interaction` contract."""


class AgentContractError(MultiTurnError, TypeError):
    """An agent behind the endpoint returned something that is not a reward."""


class AdvantageContractError(MultiTurnError, TypeError):
    """A function of advantages raised, returned values that are not advantages, or has a state that no file holds.

    It ends a run before the update: nothing could be learned from the step.
    """


class EngineError(MultiTurnError, RuntimeError):
    """The generation engine failed, or returned something that is not a generation."""


class OutageError(MultiTurnError, RuntimeError):
    """A service that a tool, an interaction or an agent needs is down. The model did not cause it.

    Raise it, or a class derived from it, where a service does not answer. Then the run does not learn from it: see
    `calls/outages/causes.py`, which also lists the other errors that count as an outage.

    Attributes:
        next_try_s: Seconds after which the service accepts a retry; None: unknown.
    """

    next_try_s: float | None = None


class UnjudgedError(MultiTurnError, RuntimeError):
    """A model's work cannot be scored, for a cause of ours: a grader is lost, an image missing, a row wrong.

    An agent behind the endpoint may raise it, also after completions; so may a reward. The conversation is invalid and
    counted. It is not about a service, so it does not count for an outage as `OutageError` does. Never raise it for
    a fault that a model can cause: a model that can make itself invalid never loses.
    """


class TrajectoryError(MultiTurnError, ValueError):
    """An append that would break a rule of `Trajectory`."""


class CertificateError(MultiTurnError, RuntimeError):
    """A training batch or a record differs from the engine's output, or cannot be verified."""
