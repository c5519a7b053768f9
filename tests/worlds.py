"""Environments for tests: small worlds in each form that `StepEnv` knows, and one that breaks in every way."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from typing import Any

import numpy as np


class Maze:
    """A world in GEM's form. Like GEM's, it seeds and draws from the random numbers of the whole process."""

    def __init__(self, size: int = 3) -> None:
        self._size = size

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        if seed is not None:
            random.seed(seed)
        time.sleep(random.random() / 1000)  # another episode in this process would draw now
        self._steps = 0
        return self._board(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self._board(), random.random(), action == "leave", self._steps == 30, {}

    def _board(self) -> str:
        return " ".join(str(random.randrange(10)) for _ in range(self._size))


class Born:
    """A world that is drawn when it is made, with the random numbers of `random` and of NumPy."""

    def __init__(self) -> None:
        self._board = f"{random.random()} {np.random.rand()}"

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return self._board, {}


class Arena:
    """A game in TextArena's raw form: the one who writes 3 wins."""

    def __init__(self, players: int = 1) -> None:
        self._players, self._current = players, 0

    def reset(self, num_players: int, seed: int | None = None) -> None:
        self._new = [(-1, f"Guess, {num_players} player.", 0), (-1, f"Seed {seed}.", 0)]
        self._won = False

    def get_observation(self) -> tuple[int, list[tuple[int, str, int]]]:
        new, self._new = self._new, []
        return self._current, new

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self._won = "[3]" in action
        self._new = [(0, action, 1), (-1, "Higher.", 2)]
        self._current = (self._current + 1) % self._players
        return self._won, {}

    def close(self) -> tuple[dict[int, int], dict[str, Any]]:
        return {0: int(self._won)}, {}


class Shell:
    """A world whose actions are commands of a shell, each of which gets the id of the world's process."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return "$", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"status {os.system(f'{action} {os.getpid()}')}", 0.0, False, False, {}


class Odd:
    """A world in Gymnasium's form that does `what` in its factory, `reset`, `step` or `close`."""

    def __init__(self, what: str = "", where: str = "step", folder: str = "") -> None:
        self._what, self._where, self._folder = what, where, folder
        self._at("make")

    def reset(self, seed: int | None = None) -> Any:
        return self._at("reset") or ("begun", {})

    def step(self, action: str) -> Any:
        return self._at("step") or (f"did {action}", 1, False, False, {})

    def close(self) -> None:
        self._at("close")
        if self._folder:
            with open(os.path.join(self._folder, f"closed-{os.getpid()}"), "w"):
                pass

    def _note_hang(self) -> None:
        if self._folder:
            with open(os.path.join(self._folder, f"hangs-{os.getpid()}"), "w"):
                pass

    def _at(self, where: str) -> Any:
        if where != self._where:
            return None
        observed = ("seen", 1.0, False, False, {}) if where == "step" else ("seen", {})
        match self._what:
            case "hang":
                self._note_hang()
                time.sleep(3600)
            case "deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                self._note_hang()
                while True:
                    pass
            case "raise":
                raise RuntimeError("the world \ud800 ends")
            case "exit":
                raise SystemExit(3)
            case "die":
                os._exit(3)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "child":
                child = subprocess.Popen(["sleep", "3600"])
                with open(os.path.join(self._folder, "child"), "w") as file:
                    file.write(str(child.pid))
            case "stops its zygote":
                threading.Thread(target=_stop, args=[os.getppid()], daemon=True).start()
            case "fork":
                os.fork()  # and the child, which should do its work and end, returns, too
            case "none":
                return 5
            case "short":
                return observed[:-1]
            case "text reward":
                return ("seen", "1", False, False, {})
            case "no flag":
                return ("seen", 1.0, 0, False, {})
            case "nan":
                return ("seen", float("nan"), False, False, {})
            case "far":
                return ("seen", 1e39, False, False, {})
            case "scalars":
                return ("seen", np.array(0.5), np.array(True), np.bool_(False), {})
            case "surrogates":
                return ("a\ud800b", *observed[1:])
            case "large":
                return ("x" * 10_000_000, *observed[1:])
            case "huge":
                return ("x" * 80_000_000, *observed[1:])
        return None


def _stop(process: int) -> None:
    while True:
        os.kill(process, signal.SIGSTOP)


def where(env: Any, observation: Any, info: Any) -> Any:
    """Return a state that is made of lists."""
    return ["at", [observation, 1.5]]


def unhashable(env: Any, observation: Any, info: Any) -> Any:
    return {"at": observation}


def loud(env: Any, observation: Any, info: Any) -> str:
    return str(observation).upper()


def number(env: Any, observation: Any, info: Any) -> Any:
    return 7


def numbered(env: Any, text: str) -> str:
    if not text.isdigit():
        raise ValueError("no number")
    return f"<{text}>"


not_callable = 3


def refuse(**kwargs: Any) -> Any:
    raise AssertionError("never called")
