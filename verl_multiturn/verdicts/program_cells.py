"""Code that runs in the sandboxes of `calls.py` and of the reward for programs, sent there as text.

It uses the standard library only.

Values are sent from one sandbox to the other as JSON of `[kind, content]`, and only values of plain types. So an object
that claims to equal everything stays in its own sandbox.
"""

import base64
import builtins
import contextlib
import functools
import importlib
import io
import json
import os
import sys
import tarfile
import types
from typing import Any

ANSWER_BYTES = 50_000
"""Length of the longest answer of a cell; a cell has none where it would be longer."""
_ERROR_CHARACTERS = 1_000
_DEPTH = 100
_ENDS = (StopIteration, StopAsyncIteration)
_RECURSION = 600_000
"""Recursion limit that programs may rely on, as in verl's `prime_code`."""


def encode(value: Any, depth: int = 0) -> list[Any]:
    """Encode a value of plain types; a value of a subclass is encoded as its plain type.

    Example:
        encode([1, "a"]) == ["list", [["int", "0x1"], ["str", "a"]]]

    Args:
        value: The value.
        depth: How deeply the value is nested.

    Raises:
        TypeError: The value, or a value in it, has another type, or it is nested too deeply.
    """
    if depth > _DEPTH:
        raise TypeError("a value that is nested too deeply")
    if value is None or value is True or value is False:
        return ["constant", value]
    if isinstance(value, int):
        return ["int", hex(int.__index__(value))]
    if isinstance(value, float):
        return ["float", float.__repr__(value)]
    if isinstance(value, complex):
        return ["complex", [float.__repr__(value.real), float.__repr__(value.imag)]]
    if isinstance(value, str):
        return ["str", str.__str__(value)]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(value).hex()]
    for of_kind in (list, tuple, set, frozenset):
        if isinstance(value, of_kind):
            # The plain type's own iterator, since a subclass may define one that yields anything.
            items: Any = of_kind.__iter__(value)  # type: ignore[arg-type]
            return [of_kind.__name__, [encode(item, depth + 1) for item in items]]
    if isinstance(value, dict):
        return ["dict", [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in dict.items(value)]]
    raise TypeError(f"a value of the type {type(value).__name__}")


def decode(encoded: Any) -> Any:
    """Return the value that was given to `encode`, in plain types."""
    kind, content = encoded
    if kind == "constant":
        return content
    if kind == "int":
        return int(content, 16)
    if kind == "float":
        return float(content)
    if kind == "complex":
        return complex(float(content[0]), float(content[1]))
    if kind == "str":
        return content
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "dict":
        return {decode(key): decode(item) for key, item in content}
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(decode, content))


def run_program(source: str, imports: str = "") -> None:
    """Run a program with the file `.stdin` as its standard input; only its standard output is kept.

    Args:
        source: The program.
        imports: Import statements that the program forgot.
    """
    _silence(2)
    given = os.open(".stdin", os.O_RDONLY | os.O_CREAT)
    os.dup2(given, 0)
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115  # as long as the process
    main = sys.modules["__main__"].__dict__
    exec(imports, main)
    sys.setrecursionlimit(_RECURSION)
    exec(compile(source, "<program>", "exec", dont_inherit=True), main)


def define(source: str, imports: str = "") -> None:
    """Run a program as the module `solution`, so that its functions can be called; its output is dropped.

    Args:
        source: The program.
        imports: Import statements that the program forgot.
    """
    _silence(1)
    _silence(2)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    exec(imports, module.__dict__)
    sys.setrecursionlimit(_RECURSION)
    exec(compile(source, "<program>", "exec", dont_inherit=True), module.__dict__)


_uploaded = bytearray()


def upload(data: str) -> None:
    """Take the next piece of a tar, in base64."""
    _uploaded.extend(base64.b64decode(data))


def unpack() -> bytes:
    """Unpack the tar that was uploaded into the current folder; answer that it was."""
    with tarfile.open(fileobj=io.BytesIO(bytes(_uploaded)), mode="r:") as tar:
        tar.extractall(".", filter="data")
    _uploaded.clear()
    return b"unpacked"


def load(functions: dict[str, str], roots: list[str]) -> None:
    """Import functions of files in the current folder, so that they can be called; their output is dropped.

    A function whose module cannot be imported, or that is not in it, is omitted.

    Args:
        functions: Where each one is, by the name that tests use: `module:function`.
        roots: Folders that imports begin in.
    """
    _silence(1)
    _silence(2)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    sys.path[:0] = [os.path.abspath(root) for root in roots]
    for name, place in functions.items():
        where, _, attributes = place.partition(":")
        with contextlib.suppress(BaseException):  # whatever the module raised
            setattr(module, name, functools.reduce(getattr, attributes.split("."), importlib.import_module(where)))


def call(request: str) -> bytes:
    """Call a function of the program, or a method of its class `Solution`, and return the cell's answer.

    The answer is `["value", encoded value]`, or `["error", [name, text]]` with the built-in type that the exception
    is of. There is no answer when the program has no such function.

    Args:
        request: JSON text of the name of the function, its positional arguments and its keyword arguments, the latter
            two as `encode` returns them.
    """
    name, arguments, keywords = json.loads(request)
    program = sys.modules["solution"].__dict__
    try:
        function = program[name] if name in program else getattr(program["Solution"](), name)
    except BaseException:  # there is no such function, so there is no answer
        return b""
    try:
        answer = ["value", encode(function(*decode(arguments), **decode(keywords)))]
    except BaseException as error:  # whatever the program raised
        answer = ["error", _described(error)]
    return handed_over(answer)


def _described(error: BaseException) -> list[str]:
    """Return the name of the nearest built-in type that an exception is of, and the beginning of its text."""
    kinds = (kind.__name__ for kind in type(error).__mro__ if vars(builtins).get(kind.__name__) is kind)
    try:
        # Of a KeyError, `str` is the key's `repr`.
        text = error.args[0] if isinstance(error, KeyError) and isinstance(error.args[0], str) else str(error)
    except BaseException:  # the program's own `__str__`
        text = ""
    return [next(kinds), str.__str__(text)[:_ERROR_CHARACTERS]]


def _rebuilt(name: str, text: str) -> BaseException:
    """Return an exception as `_described` describes it; one that is not an Exception becomes a RuntimeError.

    So does a StopIteration, as in a generator. It would end the loop of a test, `all(map(check, cases))`, as if there
    were no further case.
    """
    kind: Any = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _ENDS):
        for make in (kind, functools.partial(kind.__new__, kind)):  # UnicodeDecodeError needs more than a text
            with contextlib.suppress(TypeError):
                error: BaseException = make(text)
                return error
        return Exception(text)  # an ExceptionGroup
    return RuntimeError(f"{name}: {text}")


def handed_over(answer: list[Any]) -> bytes:
    """Return the answer of a cell as it is sent to the other sandbox, or nothing where it is too long.

    Args:
        answer: A verdict, or the result of a call, as JSON has it.
    """
    text = json.dumps(answer, ensure_ascii=False).encode("utf-8", "backslashreplace")  # a half of a pair as \\udXXX
    return text if len(text) <= ANSWER_BYTES else b""


class Pending(BaseException):
    """A call in a test has no result yet, so that the test ends here. Its `except Exception` does not catch this."""


def same(value: Any, expected: Any) -> bool:
    """Return whether a value equals the expected one as JSON: tuples count as lists, and keys as texts."""
    return bool(_as_json(value) == _as_json(expected))


def _as_json(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    return value


def judge(test: str, names: list[str], results: list[str]) -> bytes:
    """Run a test whose calls of the program return the given results in turn, and return the verdict as the answer.

    The verdict is `["pass"]`, `["fail"]`, `["unsuitable", reason]`, or `["call", name, arguments, keywords]` for the
    first call that has no result yet.

    Args:
        test: Code of the test.
        names: Names in the test that may be functions of the program.
        results: Answers of `call` to the calls so far. Any other text is an error of the call.
    """
    _silence(1)
    _silence(2)
    left = list(results)
    open_verdicts: list[list[Any]] = []

    def stub(name: str) -> Any:
        def function(*arguments: Any, **keywords: Any) -> Any:
            if not left:
                if not open_verdicts:
                    try:
                        open_verdicts.append(["call", name, encode(arguments), encode(keywords)])
                    except TypeError as error:
                        open_verdicts.append(["unsuitable", str(error)])
                raise Pending
            kind, content = json.loads(left.pop(0))
            if kind == "value":
                return decode(content)
            raise _rebuilt(*content)

        return function

    try:
        exec(compile(test, "<test>", "exec", dont_inherit=True), {"same": same, **{name: stub(name) for name in names}})
        verdict: list[Any] = ["pass"]
    except BaseException:  # an assertion, or any error that the results led to
        verdict = ["fail"]
    # Whatever the test made of the call that has no result: its `except:` catches everything.
    answer = handed_over(open_verdicts[0] if open_verdicts else verdict)
    if not answer and not results:  # the test itself makes the arguments of the call too long
        return handed_over(["unsuitable", f"more than {ANSWER_BYTES} bytes"])
    return answer


def _silence(descriptor: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, descriptor)
    os.close(nothing)
