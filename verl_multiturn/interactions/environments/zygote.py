"""The program of the forks of an environment's zygote: each plays one episode. `processes/zygote.py` forks them.

Some environments seed and draw from the random numbers of the whole process, so that episodes in one process would
disturb each other.
"""

from __future__ import annotations

import socket
from typing import Any

from verl_multiturn.calls.outages.authorship import WrittenTexts
from verl_multiturn.calls.outages.causes import cause_of
from verl_multiturn.errors import OutageError
from verl_multiturn.interactions.environments.episode import EnvironmentCode, Episode, WrongTypeError, load
from verl_multiturn.processes.lines import answer_lines
from verl_multiturn.processes.zygote import problem_of

__all__ = ["load", "serve"]


def serve(served: socket.socket, loaded: EnvironmentCode) -> None:
    """Answer the requests of one episode, a line of JSON each, until the worker closes the socket.

    Args:
        served: The socket.
        loaded: The environment's code.
    """
    episode: Episode | None = None

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal episode
        try:
            if request["do"] == "reset":
                episode = Episode(loaded, request["seed"], request["kwargs"])
                return episode.reset()
            if episode is not None and request["do"] == "step":
                return episode.step(request["text"])
            if episode is not None:
                episode.close()
            return {}
        except WrongTypeError as error:
            return {"wrong_type": str(error)}
        except BaseException as error:  # an environment may raise anything, SystemExit too
            # An action may be the reason of an error of a connection; it is never that of an error in `reset`.
            can_be = request["do"] == "reset" or isinstance(error, OutageError)
            written = WrittenTexts(row=(request.get("kwargs"),))
            is_outage = can_be and cause_of(error, "model", written=written) == "outage"
            return {"failed": problem_of(error), "is_outage": is_outage}

    answer_lines(served, answer)
