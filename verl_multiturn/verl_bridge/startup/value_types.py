"""The type of each setting of verl's, and values that do not have it.

Hydra takes any text for any key: `off`, `no` and `"False"` are texts, which verl's code then finds true.

Invariants:
- a value has the type of verl's dataclass field where there is one, otherwise that of its default; a whole number is a
  number, too, and a truth value is neither;
- null is valid only where the default is null or the annotation allows it;
- a setting whose default is null and that no dataclass has, and one that takes several types, has its types in a line
  of the kind `type` of `verl_keys.tsv`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_multiturn.describe import did_you_mean, show
from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.startup import verl_keys
from verl_multiturn.verl_bridge.startup.verl_classes import ClassField, fields_of
from verl_multiturn.verl_bridge.startup.view import RunView

Kinds = frozenset[str]
"""Names of types, of `NAMES`, and each text of a `Literal` after an equals sign; with `any` every value fits."""

NAMES = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "text": "text",
    "list": "a list",
    "mapping": "a section",
    "null": "null",
}
"""Names in errors, by kind."""

_BY_NAME = {"bool": "bool", "int": "int", "float": "float", "str": "text", "list": "list", "List": "list",
            "tuple": "list", "Tuple": "list", "ListConfig": "list", "dict": "mapping", "Dict": "mapping",
            "DictConfig": "mapping", "None": "null"}  # fmt: skip
_TRUE, _FALSE = ("true", "yes", "y", "on", "1"), ("false", "no", "n", "off", "0")
_WHOLE = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_THOUSANDS = {"k": 1024, "m": 1024**2}
_REFERENCE = re.compile(r"\$\{(?:oc\.select:\s*)?([\w.]+)(?:,\s*(.*))?\}")
_ANY: Kinds = frozenset({"any"})


def check_value_types(run: RunView) -> None:
    """Refuse a value that has not the type of its setting: verl takes the text `off` for true."""
    engine = str(run.config.get("model_engine"))
    values = _values(run, engine)
    # The user's own setting is named, and not a reference to it.
    for key, value in sorted(values, key=lambda item: "${" in str(run.written(item[0]))):
        kinds = kinds_of(key, engine)
        if not fits(value, kinds):
            raise ConfigError(misfit(key, value, kinds, str(run.written(key))))


def _values(run: RunView, engine: str) -> list[tuple[str, Any]]:
    """Return all settings with their values; a section with an entry of `verl_keys` is one setting."""
    known = verl_keys.defaults(engine)
    found: list[tuple[str, Any]] = []

    def walk(section: Any, path: str) -> None:
        for name in section:
            key = f"{path}.{name}"
            if OmegaConf.is_missing(section, name):
                continue
            try:
                value = section[name]
            except OmegaConfBaseException as error:
                raise ConfigError(f"{key}: {str(error).splitlines()[0]}; correct the reference") from None
            if OmegaConf.is_dict(value) and key not in known:
                walk(value, key)
            else:
                found.append((key, value))

    for name in {key.partition(".")[0] for key in known} & set(run.config):
        if OmegaConf.is_dict(run.config[name]) and name not in known:
            walk(run.config[name], name)
        else:
            found.append((name, run.config[name]))
    return found


@functools.cache
def kinds_of(key: str, engine: str = "dp") -> Kinds:
    """Return the types that a setting of verl's may have; `any` for a setting that verl does not know.

    Args:
        key: Path of the setting.
        engine: `model_engine`.
    """
    if listed := verl_keys.types_of(key):
        return frozenset(listed)
    known, (section, _, name) = verl_keys.defaults(engine), key.rpartition(".")
    field = fields_of(_class_of(section, engine)).get(name)
    if key not in known:
        if field is not None:
            return _kinds_of_field(field)
        return frozenset({"mapping", "null"}) if section_of(key, engine) else _ANY
    default = _kinds_of_default(known[key], section, engine)
    if field is None:
        return _ANY if default == {"null"} else default
    # verl's own files hold a few defaults that do not fit their annotations.
    return _kinds_of_field(field) | default


def section_of(key: str, engine: str) -> bool:
    """Return whether a path is a section of verl's configuration."""
    return any(name.startswith(f"{key}.") for name in verl_keys.defaults(engine))


@functools.cache
def _class_of(section: str, engine: str) -> str:
    """Return the name of the dataclass of a section; empty where none is known."""
    if (target := verl_keys.defaults(engine).get(f"{section}._target_")) is not None:
        return str(target).rpartition(".")[2]
    above, _, name = section.rpartition(".")
    field = fields_of(_class_of(above, engine)).get(name) if above else None
    names = [] if field is None else [node.id for node in ast.walk(field.annotation) if isinstance(node, ast.Name)]
    return next((name for name in names if fields_of(name)), "")


def _kinds_of_default(default: Any, section: str, engine: str) -> Kinds:
    """Return the types of a default; a reference has the types of its target."""
    if not (isinstance(default, str) and "${" in default):
        return frozenset({kind_of(default)})
    found = _REFERENCE.fullmatch(default)
    if found is None:
        return frozenset({"text"})
    key = _absolute(found[1], section)
    if key not in verl_keys.defaults(engine) and not section_of(key, engine):
        return _ANY
    other = kinds_of(key, engine)
    return other if found[2] is None else other | _kinds_of_default(yaml.safe_load(found[2]), section, engine)


def _absolute(reference: str, section: str) -> str:
    """Return the path of a reference: one dot before it is the section that it is in, two the one above."""
    name = reference.lstrip(".")
    for _ in range(len(reference) - len(name) - 1):
        section = section.rpartition(".")[0]
    return f"{section}.{name}" if reference.startswith(".") else name


def _kinds_of_field(field: ClassField) -> Kinds:
    kinds = _kinds_of_annotation(field.annotation)
    is_null = isinstance(field.default, ast.Constant) and field.default.value is None
    return kinds | {"null"} if is_null else kinds


def _kinds_of_annotation(node: ast.expr) -> Kinds:
    if isinstance(node, ast.BinOp):
        return _kinds_of_annotation(node.left) | _kinds_of_annotation(node.right)
    if isinstance(node, ast.Constant):
        if node.value is None:
            return frozenset({"null"})
        return _kinds_of_annotation(ast.parse(str(node.value), mode="eval").body)
    if isinstance(node, ast.Subscript):
        outer = ast.unparse(node.value).rpartition(".")[2]
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if outer == "Literal":
            return frozenset(f"={each.value!s}" for each in inner if isinstance(each, ast.Constant))
        if outer in ("Optional", "Union"):
            found = [kind for each in inner for kind in _kinds_of_annotation(each)]
            return frozenset([*found, "null"] if outer == "Optional" else found)
        return frozenset({_BY_NAME.get(outer, "any")})
    name = ast.unparse(node).rpartition(".")[2]
    return frozenset({"mapping" if fields_of(name) else _BY_NAME.get(name, "any")})


def kind_of(value: Any) -> str:
    """Return the kind of a value."""
    if value is None:
        return "null"
    if OmegaConf.is_dict(value) or isinstance(value, Mapping):
        return "mapping"
    if OmegaConf.is_list(value) or isinstance(value, list | tuple):
        return "list"
    return {"bool": "bool", "int": "int", "float": "float"}.get(type(value).__name__, "text")


def fits(value: Any, kinds: Kinds) -> bool:
    """Return whether a value has one of the types."""
    kind = kind_of(value)
    if "any" in kinds or kind in kinds or (kind == "int" and "float" in kinds):
        return True
    return f"={value}" in kinds


def misfit(key: str, value: Any, kinds: Kinds, written: str = "") -> str:
    """Return the fault of a value that has none of the types, and the remedy.

    Args:
        key: The setting.
        value: Its value.
        kinds: The types.
        written: The value as it is written, where it refers to another.
    """
    wanted = [NAMES[kind] for kind in NAMES if kind in kinds and kind != "null"]
    choices = sorted(kind[1:] for kind in kinds if kind.startswith("="))
    wanted += [f"one of {choices}"] if choices else []
    wanted += ["null"] if "null" in kinds else []
    expected = f"expected {' or '.join(wanted)}"
    shown = "null" if value is None else show(value, 100)
    return f"{key}={shown}: {expected}; {_remedy(key, value, kinds, choices, written)}"


def _remedy(key: str, value: Any, kinds: Kinds, choices: list[str], written: str) -> str:
    if "${oc.env:" in written and kinds & {"bool", "int", "float"}:
        reference = written if written.startswith("${oc.env:") and written.endswith("}") else "${oc.env:NAME}"
        return f"a variable is text: write '{key}=${{oc.decode:{reference}}}'"
    if (plain := _plain(value, kinds)) is not None:
        return f"write {key}={plain}"
    if choices:
        return did_you_mean(str(value), choices) or "choose one of them"
    if "bool" in kinds:
        return f"write {key}=True or {key}=False"
    if kinds & {"int", "float"}:
        return f"write its digits, or leave {key} out"
    if "text" in kinds and value is not None and kind_of(value) not in ("list", "mapping"):
        return f"""write '{key}="{value}"', with both quotes"""
    if "list" in kinds:
        return f"write '{key}=[…]'"
    return f"leave {key} out" if "mapping" not in kinds else f"set what is in it, {key}.NAME=…, or leave it out"


def _plain(value: Any, kinds: Kinds) -> str | None:
    """Return the value that was meant, as Hydra reads it; None if unclear."""
    text = str(value).strip().strip("'\"").strip()
    if "bool" in kinds and text.lower() in _TRUE + _FALSE and kind_of(value) in ("text", "int"):
        return str(text.lower() in _TRUE)
    if isinstance(value, bool) or kind_of(value) in ("list", "mapping", "null"):
        return None
    if "int" in kinds:
        if _WHOLE.fullmatch(text.replace("_", "").replace(",", "")):
            return str(int(text.replace("_", "").replace(",", "")))
        if _NUMBER.fullmatch(text) and float(text).is_integer():
            return str(int(float(text)))
        if _WHOLE.fullmatch(text[:-1]) and text[-1:].lower() in _THOUSANDS:
            return str(int(text[:-1]) * _THOUSANDS[text[-1:].lower()])
    if "float" in kinds and _NUMBER.fullmatch(text):
        return text
    return None
