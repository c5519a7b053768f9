"""Honest programs that a sandbox must let run: processes, pipes, sockets, shared memory, copies, shells."""

import asyncio

import pytest

from verl_multiturn.sandbox.pool import SandboxPool
from verl_multiturn.sandbox.settings import SandboxSettings

PROGRAMS = {
    "multiprocessing": """
import multiprocessing
context = multiprocessing.get_context("fork")
with context.Pool(3) as workers: print(workers.map(abs, [-1, -2]))
""",
    "executor": """
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
with ProcessPoolExecutor(2) as processes, ThreadPoolExecutor(2) as threads:
    print((list(processes.map(abs, [-1])), list(threads.map(abs, [-2]))))
""",
    "manager": """
import multiprocessing
with multiprocessing.get_context("fork").Manager() as manager:
    shared = manager.dict(a=1)
    print(shared.items())
""",
    "shared values": """
import multiprocessing
context = multiprocessing.get_context("fork")
value, numbers = context.Value("i", 3), context.Array("d", 5)
def work():
    with value: value.value += 1
    numbers[0] = 2.0
process = context.Process(target=work); process.start(); process.join()
value.value, numbers[0]
""",
    "shared memory": """
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=100)
memory.buf[0] = 7
other = SharedMemory(memory.name); found = other.buf[0]
other.close(), memory.close(), memory.unlink()
found
""",
    "anonymous mapping": """
import mmap, os
shared, private = mmap.mmap(-1, 13), mmap.mmap(-1, 13, access=mmap.ACCESS_COPY)
flags = mmap.mmap(-1, 13, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
if os.fork() == 0: shared.write(b"Hello world!"), private.write(b"x"), os._exit(0)
os.wait()
shared[:12], private[:1], len(flags), type(shared), isinstance(shared, mmap.mmap)
""",
    "asyncio": """
import asyncio
async def main():
    process = await asyncio.create_subprocess_exec("echo", "1", stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    server = await asyncio.start_unix_server(lambda reader, writer: (writer.write(b"2"), writer.close()), "socket")
    reader, writer = await asyncio.open_unix_connection("socket")
    answer = await reader.read()
    writer.close(); server.close()
    return output, answer
asyncio.run(main())
""",
    "shell": """
import subprocess
subprocess.run("timeout 20 sh -c 'echo a; echo b | cat'; (sleep 0 & wait); echo $?", shell=True, capture_output=True,
               text=True).stdout
""",
    "signals": """
import os, signal
seen = []
signal.signal(signal.SIGCHLD, lambda *_: seen.append(1))
if os.fork() == 0: os._exit(0)
os.wait()
len(seen)
""",
    "copies": """
import os, shutil, socket
with open("a", "w") as file: file.write("x" * 100000)
copied = shutil.copy("a", "b"), os.sync()
first, second = socket.socketpair()
with open("b", "rb") as file: first.sendfile(file, count=1000)
os.path.getsize("b"), len(second.recv(2000))
""",
    "vfork of a large process": """
import os, time
os.mkfifo("fifo")
if os.fork() == 0: time.sleep(0.5), os.open("fifo", os.O_WRONLY), os._exit(0)
kept = bytearray(170 << 20)
# Until somebody writes, the child waits in our memory; so do we.
child = os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, "fifo", os.O_RDONLY, 0)])
os.waitpid(child, 0)[1]
""",
    "main thread ends first": """
import ctypes, os, platform, threading
first, second = os.pipe()
def work():
    while os.read(first, 1) != b"q": pass
    os._exit(7)
child = os.fork()
if child == 0:
    threading.Thread(target=work).start()
    ctypes.CDLL(None).syscall(60 if platform.machine() == "x86_64" else 93, 0)
while open(f"/proc/{child}/stat").read().split()[2] != "Z": pass
os.write(second, b"q"), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
""",
    "descriptors of children": """
import os, subprocess
first, second = os.pipe()
os.set_inheritable(second, True)
keep = subprocess.run(["sh", "-c", f"echo a >&{second}"], pass_fds=[second]), os.read(first, 2)
lose = subprocess.run(["sh", "-c", f"echo a >&{second}"], close_fds=True, stderr=subprocess.DEVNULL)
keep[0].returncode, keep[1], lose.returncode != 0, os.closerange(3 + second, 10 ** 6)
""",
    "epoll": """
import os, select
poll, pipes = select.epoll(), [os.pipe() for _ in range(100)]
for first, second in pipes: poll.register(first, select.EPOLLIN), os.write(second, b"x")
found = len(poll.poll())
if os.fork() == 0: os._exit(len(poll.poll()))
found, os.waitstatus_to_exitcode(os.wait()[1])
""",
    "core limit": """
import resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.getrlimit(resource.RLIMIT_CORE)
""",
    "zeros": "open('/dev/zero', 'rb').read(3)",
}
ANSWERS = {
    "multiprocessing": "[1, 2]",
    "executor": "([1], [2])",
    "manager": "[('a', 1)]",
    "shared values": "(4, 2.0)",
    "shared memory": "7",
    "anonymous mapping": "(b'Hello world!', b'\\x00', 13, <class 'mmap.mmap'>, True)",
    "asyncio": "(b'1\\n', b'2')",
    "shell": "'a\\nb\\n0\\n'",
    "signals": "1",
    "copies": "(100000, 1000)",
    "vfork of a large process": "0",
    "main thread ends first": "(1, 7)",
    "descriptors of children": "(0, b'a\\n', True, None)",
    "epoll": "(100, 100)",
    "core limit": "(1, 1)",
    "zeros": "b'\\x00\\x00\\x00'",
}


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    """Run all programs at once, each in its own sandbox, and return their outputs."""

    async def run_all() -> list[str]:
        async with SandboxPool(SandboxSettings(timeout_s=120, memory_mb=256)) as pool:

            async def run(code: str) -> str:
                result = await (await pool.acquire()).run(code)
                return result.output + str(result.stopped or "")

            return await asyncio.gather(*map(run, PROGRAMS.values()))

    return dict(zip(PROGRAMS, asyncio.run(run_all()), strict=True))


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_honest_program_runs(answers: dict[str, str], name: str) -> None:
    assert answers[name] == ANSWERS[name] + "\n"
