"""Agents of many kinds, as users write them; they import nothing of the package."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path


def session_form(row, session):
    return {"reward": row["x"], "completions": {session.id: 1}}


async def session_form_async(row, session):
    await asyncio.sleep(0)
    return row["x"]


async def run(data, base_url=None, api_key=None):
    return {"chatcmpl-a": 1.0, "chatcmpl-b": 0.5} if (base_url, api_key) == ("http://127.0.0.1:1/v1", "key") else None


async def run_agent_return_reward(data):
    return float(os.environ["OPENAI_BASE_URL"] == "http://127.0.0.1:1/v1") + data["x"]


class AgentClass:
    made = 0

    def __init__(self, bonus=0.25):
        AgentClass.made += 1
        self.bonus = bonus

    async def run(self, data, **extra_kwargs):
        return data["x"] + self.bonus + len(extra_kwargs)


class CalledClass:
    def __call__(self, row, session):
        return row["x"]


class NeedsArguments:
    def __init__(self, model):
        self.model = model

    async def run(self, data, **extra_kwargs):
        return 0.0


instance = AgentClass(0.5)
number = 7


def nothing():
    return 0.0


def too_much(row, session, model):
    return 0.0


def starts_a_loop(row, session):
    return asyncio.run(session_form_async(row, session))


def returns_awaitable(row, session):
    return session_form_async(row, session)


def ask(row, session):
    """Ask as a blocking client does."""
    request = urllib.request.Request(
        f"{session.base_url}/chat/completions",
        data=json.dumps({"x": row["x"]}).encode(),
        headers={"Authorization": f"Bearer {session.api_key}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["x"]


def spin(row, session):
    while True:
        pass


go = threading.Event()


def block(row, session):
    """Block in a call that nothing interrupts until `go` is set."""
    if row["blocks"]:
        go.wait(120)


async def wait_forever(row, session):
    try:
        row["began"].append(True)
        await asyncio.sleep(1e6)
    finally:
        row["ended"].append(True)


async def leaves_tasks(row, session):
    row["kept"] = asyncio.ensure_future(asyncio.sleep(1e6))
    return 0.5


def look(row):
    Path(row["seen"]).write_text("noted" if Path(row["noted"]).exists() else "not noted")


async def looks_after_its_return(row, session):
    """Leave a task that looks, when it is ended, whether the return was noted."""

    async def linger():
        try:
            await asyncio.sleep(1e6)
        finally:
            look(row)

    row["kept"] = asyncio.ensure_future(linger())
    await asyncio.sleep(0)


def note_process(row):
    with Path(row["pids"]).open("a") as file:
        file.write(f"{os.getpid()}\n")


def fork_tree(row, depth):
    """Fork two processes, each of which does the same, `depth` times; all of them wait."""
    for _ in range(2 if depth else 0):
        if os.fork() == 0:
            fork_tree(row, depth - 1)
            note_process(row)
            time.sleep(1e6)


def leave_group(row):
    """Start a process that is in another session and has no living parent."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            note_process(row)
            time.sleep(1e6)
        os._exit(0)


def wait_for_notes(row, count):
    while not Path(row["pids"]).exists() or len(Path(row["pids"]).read_text().split()) < count:
        time.sleep(0.01)


def exits(row, session):
    sys.exit(row["status"])


async def exits_async(row, session):
    sys.exit(row["status"])


def misbehave(row):
    """Do the action `row["do"]`, in a process of its own."""
    do = row["do"]
    if do == "ignore SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif do == "obey SIGTERM":
        signal.signal(signal.SIGTERM, lambda *_: (print("told to end"), sys.exit(5)))
    note_process(row)  # who reads it may send a signal
    if do in ("hang", "ignore SIGTERM", "obey SIGTERM"):
        while True:
            time.sleep(1)
    elif do == "flood":
        for _ in range(100):
            sys.stdout.write("x" * 999_999 + "\n")
        raise ValueError("drowned")
    elif do == "fork":
        fork_tree(row, 4)
        wait_for_notes(row, 31)
        time.sleep(1e6)
    elif do == "leave":
        leave_group(row)
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        wait_for_notes(row, 2)
        return 0.5
    elif do == "kill the keeper":
        leave_group(row)
        wait_for_notes(row, 2)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1e6)
    elif do == "exit":
        sys.exit(3)
    elif do == "_exit":
        os._exit(0)
    elif do == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif do == "surrogates":
        print("half \ud800")
        raise ValueError("a \ud800 text")
    elif do == "no stdout":
        sys.stdout.close()
        os.close(1)
        return 0.25
    elif do == "forks that end":
        statuses = []
        for end in (lambda: sys.exit(0), lambda: sys.exit(3), lambda: 1 / 0, lambda: -1.0):
            if not (child := os.fork()):
                return end()
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return float(statuses == [0, 3, 1, 0])
    elif do == "late thread":
        threading.Thread(target=time.sleep, args=(1e6,)).start()
        return 0.75
    elif do == "environment":
        return {"reward": float("SECRET_OF_A_SIBLING" in os.environ), "completions": {os.environ["OPENAI_API_KEY"]: 1}}
    elif do == "run a program":
        os.system(f"{row['program']} {os.getpid()}")
    elif do == "nan":
        return float("nan")
    return row.get("x", 0.0)
