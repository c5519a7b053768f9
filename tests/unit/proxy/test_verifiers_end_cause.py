"""Who caused an episode of verifiers to end as it did."""

from dataclasses import replace

import pytest

from verl_multiturn.errors import OutageError, UnjudgedError
from verl_multiturn.harnesses.ends import AgentFailedError, HarnessEndKind, reward_of
from verl_multiturn.harnesses.verifiers.end_cause import EpisodeEvents, Fault, SeatTrace, end_of

SPOKEN = SeatTrace("agent", reward=0.5, turns=2)
SILENT = SeatTrace("agent")
_REFUSED = "OpenEnvEnv.run(): RuntimeError: Server error: it has a word: x (code: {})"


def failed(kind: str, text: str, trace: SeatTrace = SPOKEN) -> EpisodeEvents:
    return EpisodeEvents(False, traces=[replace(trace, faults=[Fault(kind, text)])])


@pytest.mark.parametrize(
    ("story", "kind"),
    [
        (EpisodeEvents(True, traces=[SPOKEN]), "reward"),
        (EpisodeEvents(True, traces=[replace(SPOKEN, stop="max_turns")]), "reward"),
        (EpisodeEvents(True, traces=[replace(SPOKEN, stop="agent_timeout")]), "reward"),
        (EpisodeEvents(True, traces=[replace(SPOKEN, stop="scoring_timeout")]), "unjudged"),
        (EpisodeEvents(True, traces=[replace(SILENT, stop="setup_timeout")]), "unjudged"),
        (EpisodeEvents(True, traces=[replace(SPOKEN, trainable=False)]), "unjudged"),
        (EpisodeEvents(True, traces=[replace(SPOKEN, reward=float("nan"))]), "unjudged"),
        # an environment that goes on after a seat has failed calls the episode complete
        (EpisodeEvents(True, traces=[replace(SPOKEN, faults=[Fault("HarnessError", "x")])]), "reward"),
        (failed("SandboxError", "runtime died"), "outage"),
        (failed("TunnelError", "no tunnel", SILENT), "outage"),
        (failed("InterceptionError", "connection refused"), "outage"),
        (failed("SandboxError", "read 'answer.txt': No such file"), "failed"),
        (failed("SandboxError", "read 'answer.txt': No such file", SILENT), "outage"),
        (failed("ProviderError", "upstream 400: the conversation no longer fits"), "failed"),
        (failed("HarnessError", "harness 'null' exited 1"), "failed"),
        (failed("HarnessError", "harness setup: OSError: x", SILENT), "unjudged"),
        (failed("TaskError", "scoring: KeyError: 'answer'"), "unjudged"),
        (failed("TaskError", "scoring: ValueError: could not convert string to float: 'seven'"), "failed"),
        (failed("TaskError", "task setup: ValueError: no such level", SILENT), "unjudged"),
        (failed("ToolsetError", "its process ended before it had a port", SILENT), "unjudged"),
        (EpisodeEvents(False, [SPOKEN], [Fault("EnvError", "OpenEnvEnv.run(): RuntimeError: x")]), "unjudged"),
        (EpisodeEvents(False, [SPOKEN], [Fault("EnvError", "OpenEnvEnv.run(): ValueError: non-object")]), "failed"),
        (EpisodeEvents(False, [SPOKEN], [Fault("EnvError", _REFUSED.format("VALIDATION_ERROR"))]), "failed"),
        (EpisodeEvents(False, [SILENT], [Fault("EnvError", _REFUSED.format("VALIDATION_ERROR"))]), "unjudged"),
        (EpisodeEvents(False, [SPOKEN], [Fault("EnvError", _REFUSED.format("EXECUTION_ERROR"))]), "unjudged"),
        (EpisodeEvents(False, [SPOKEN], [Fault("EnvError", _REFUSED.format("CAPACITY_REACHED"))]), "unjudged"),
        (EpisodeEvents(False, [], [Fault("EnvError", _REFUSED.format("CAPACITY_REACHED"))]), "outage"),
        # the model may have ended the server, once it has spoken
        *(
            (EpisodeEvents(False, traces, [Fault("EnvError", f"OpenEnvEnv.run(): {each}: it failed")]), kind)
            for each in ("ConnectionError", "ConnectionRefusedError", "ConnectError", "ConnectTimeout")
            for traces, kind in (([SPOKEN], "unjudged"), ([SILENT], "outage"), ([], "outage"))
        ),
        (failed("ConnectionError", "nobody listens", SILENT), "outage"),
        # an outage is the cause of what comes after it
        (EpisodeEvents(False, [SPOKEN], [Fault("EnvError", "x"), Fault("SandboxError", "gone")]), "outage"),
        (EpisodeEvents(False, [SPOKEN], [Fault("HarnessError", "x"), Fault("TaskError", "y")]), "unjudged"),
        (EpisodeEvents(False, [SPOKEN], late=True), "unjudged"),
        (EpisodeEvents(False), "unjudged"),
    ],
)
def test_who_caused_it(story: EpisodeEvents, kind: HarnessEndKind) -> None:
    end = end_of(story)
    assert end.kind == kind
    assert bool(end.problem) == (kind != "reward")


def test_rewards_by_seat_are_those_of_trainable_ones() -> None:
    traces = [SeatTrace("solver", reward=1.0), SeatTrace("solver", reward=0.0), SeatTrace("critic", reward=4.0)]
    end = end_of(EpisodeEvents(True, [*traces, SeatTrace("user", trainable=False, reward=9.0)]))
    assert end.seats == {"solver": 0.5, "critic": 4.0}
    assert end.reward == pytest.approx(5 / 3)
    assert end.others == ("user",)


def test_the_error_of_each_end() -> None:
    assert reward_of(end_of(EpisodeEvents(True, [SPOKEN]))) == 0.5
    for story, error in (
        (failed("SandboxError", "gone"), OutageError),
        (failed("TaskError", "gone"), UnjudgedError),
        (failed("HarnessError", "gone"), AgentFailedError),
    ):
        with pytest.raises(error, match="gone"):
            reward_of(end_of(story))
