"""Loop of the worker: run cells of untrusted code, one after the other, in one process.

Invariant: the messages of this process are not trusted. Its output is text for the model. The nonce that it sends back
means only that the cell is over. Code that finds the nonce can end its own cell early, or never, and nothing more: the
next cell has another nonce, and the other conversations have other processes.

A cell may be run for its value. It goes back behind the nonce, apart from all that was printed. So it is the word of
the code that runs in this process, and of no party whose texts and numbers that code only reads or prints.

Runs inside the sandbox. Imports the standard library only.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import linecache
import os
import socket
import sys
import traceback
from io import BufferedWriter, FileIO, StringIO, TextIOWrapper
from types import ModuleType, TracebackType

NONCE_BYTES = 16
"""Length of the random bytes before the code of each cell, which the worker sends back when the cell is over."""
PACKET_BYTES = 128 * 1024
"""Length of the longest packet: a nonce, a kind and the code; or a nonce and a value."""
VALUE_BYTES = 64 * 1024
"""Length of the longest value of a cell."""
PLAIN, WITH_VALUE = b"p", b"v"
"""Kinds of cells, between the nonce and the code: a plain one, and one whose value is requested."""


def serve(task: socket.socket) -> None:
    """Run the cells that arrive, all in one `__main__`, until the socket is closed.

    Args:
        task: The worker's end of the socket to the supervisor.
    """
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    streams = [_stream(fd) for fd in (1, 2)]
    process = os.getpid()
    count = 0
    while packet := task.recv(PACKET_BYTES):
        count += 1
        sys.stdout, sys.stderr = streams
        nonce, kind, code = packet[:NONCE_BYTES], packet[NONCE_BYTES : NONCE_BYTES + 1], packet[NONCE_BYTES + 1 :]
        value = _run(code.decode("utf-8", "replace"), main, name := f"<cell {count}>", kind == WITH_VALUE)
        if kind == WITH_VALUE:  # a piece of a file, say: megabytes sent in cells must not fill the memory
            linecache.cache.pop(name, None)
        for stream in (*streams, sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the code may have closed or replaced it
                stream.flush()
        if os.getpid() != process:  # this is a child that the cell forked: it ends with the cell
            os._exit(0)
        task.send(nonce + value)


def warm_up() -> None:
    """Run a cell and a failing cell, so that every later fork has the objects that Python makes on first use."""
    streams = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = StringIO()
    for source in ("1", "1 / 0"):
        _run(source, ModuleType("__main__"), "<cell>")
    sys.stdout, sys.stderr = streams
    linecache.cache.clear()
    del builtins._  # type: ignore[attr-defined]  # the display hook set it


def _stream(fd: int) -> TextIOWrapper:
    raw = FileIO(fd, "w", closefd=False)
    return TextIOWrapper(BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _run(source: str, main: ModuleType, name: str, with_value: bool = False) -> bytes:
    """Run a cell as a notebook does: print the value of a last expression, and an error as a traceback.

    With `with_value` the last expression is not printed. If it is a `bytes` object and not too long, it is returned.
    """
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    try:
        tree = ast.parse(source, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec", dont_inherit=True), main.__dict__)
        if with_value and isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), main.__dict__)
            return value if type(value) is bytes and len(value) <= VALUE_BYTES else b""
        if last is not None:
            exec(compile(ast.Interactive([last]), name, "single", dont_inherit=True), main.__dict__)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            print(f"SystemExit: {stop.code}", file=sys.stderr)
    except BaseException as error:  # whatever the code raised is part of its output
        _show(error, name)
    return b""


def _show(error: BaseException, name: str) -> None:
    try:
        traceback.print_exception(type(error), error, _of_the_cell(error.__traceback__, name))
    except BaseException:  # the code broke the printing of errors
        os.write(2, f"{type(error).__name__}\n".encode())


def _of_the_cell(trace: TracebackType | None, name: str) -> TracebackType | None:
    """Return the traceback from the cell's first frame on; None for a syntax error of the cell."""
    while trace is not None and trace.tb_frame.f_code.co_filename != name:
        trace = trace.tb_next
    return trace
