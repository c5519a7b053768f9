"""Read `verl_keys.tsv`, the readers of each setting of verl and why some do nothing, and find its faults beside verl.

A line is PATTERN, KIND, places, WEIGHT, REASON and REMEDY, with tabs between; the last three may be missing. `*` in a
pattern matches any text, dots too, and `{a,b}`, once, for one of several. The last line that fits a setting holds,
so that general ones come first. KIND is one of

- `always`: every run reads it. A place is a file of verl, or of ours (`verl_multiturn/…`), in which the setting's own
  name occurs as an attribute or in quotes. `FILE:TEXT` is a file in which another text occurs, such as the section's;
  a text that ends with a dot is completed by the name.
- `read`: a run reads it whose settings ask for it. Places as above.
- `unread`: with verl's V1 trainer and SGLang nothing reads it, so that the line has a reason, or a row of the start-up
  check names it. The places are the files in which its name occurs all the same with another meaning; `*`: a
  common word.
- `type`: in the place of places, the types that the setting's value may have (`value_types.NAMES`). Such a line has
  no readers, and is for a setting whose type neither its default nor a dataclass of verl's shows.

A REASON is a sentence about a setting that has no effect, or a wrong one, in every run of the V1 trainer with
SGLang. The start-up check gives it, with the REMEDY, where the setting is not verl's default. WEIGHT is `refuse` where
it would change the training, else `tell`. A reason that depends on the run is in `refusals/silent_settings.py`.

Nothing here needs more of verl than its files, so that the answer takes no second.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

ENGINES = {"dp": "_generated_ppo_trainer.yaml", "megatron": "_generated_ppo_megatron_trainer.yaml"}
"""By `model_engine`: the flat file of all settings and their defaults that verl ships."""

TYPE = "type"
"""The kind of a line that gives types."""

REFUSE, TELL = "refuse", "tell"
"""The weights of a reason."""

TABLE = Path(__file__).with_name("verl_keys.tsv")
_OURS = Path(__file__).resolve().parents[3]
# Files that no run with the V1 trainer and SGLang comes through: other trainers, other engines, definitions.
_ELSEWHERE = (
    "experimental/fully_async_policy/*", "experimental/one_step_off_policy/*", "experimental/separation/*",
    "model_merger/*", "models/*", "third_party/*", "tools/*", "trainer/config/*", "trainer/main_eval.py",
    "trainer/main_generation_server.py", "trainer/main_ppo_v0.py", "trainer/ppo/ray_trainer.py", "trainer/sft_*",
    "utils/reward_score/*", "utils/trtllm/*", "utils/veomni/*", "utils/vllm/*", "workers/config/*",
    "workers/engine/automodel/*", "workers/engine/mindspeed/*", "workers/engine/torchtitan/*",
    "workers/engine/veomni/*", "workers/engine_workers_tinker.py", "workers/reward_manager/*",
    "workers/rollout/hf_rollout.py", "workers/rollout/naive/*", "workers/rollout/schemas.py",
    "workers/rollout/trtllm_rollout/*", "workers/rollout/vllm_rollout/*",
)  # fmt: skip
_NAMED = re.compile(r"\.([A-Za-z_]\w*)|[\"']([A-Za-z_][\w.-]*)[\"']")


@dataclass(frozen=True)
class VerlKey:
    """A line of the table."""

    pattern: str
    kind: str
    places: tuple[str, ...]
    weight: str = ""
    reason: str = ""
    remedy: str = ""

    def settings(self) -> tuple[str, ...]:
        """Return the settings that a pattern without `*` matches."""
        begin, brace, rest = self.pattern.partition("{")
        names, _, end = rest.partition("}")
        return tuple(f"{begin}{name}{end}" for name in names.split(",")) if brace else (self.pattern,)

    def fits(self, key: str) -> bool:
        """Return whether the pattern fits a setting."""
        return _expression(self.pattern).fullmatch(key) is not None


@functools.cache
def _expression(pattern: str) -> re.Pattern[str]:
    written = {"*": ".*", "{": "(?:", "}": ")", ",": "|"}
    return re.compile("".join(written.get(character) or re.escape(character) for character in pattern))


@functools.cache
def entries() -> tuple[VerlKey, ...]:
    """Return the lines of the table in their order."""
    found = []
    for line in filter(None, TABLE.read_text(encoding="utf-8").splitlines()):
        pattern, kind, places, *why = [*line.split("\t"), ""][:6]
        found.append(VerlKey(pattern, kind, tuple(places.split()), *filter(None, why)))
    return tuple(found)


def entry_of(key: str) -> VerlKey | None:
    """Return the line of readers that holds for a setting; None without one."""
    return next((entry for entry in reversed(entries()) if entry.kind != TYPE and entry.fits(key)), None)


def types_of(key: str) -> tuple[str, ...]:
    """Return the types that a line of the table gives a setting; empty without one."""
    return next((entry.places for entry in reversed(entries()) if entry.kind == TYPE and entry.fits(key)), ())


def verl_root() -> Path:
    """Return the folder of the installed verl, which is not imported."""
    found = importlib.util.find_spec("verl")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


@functools.cache
def defaults(engine: str) -> dict[str, Any]:
    """Return all settings of verl with their defaults, interpolations as they are written.

    Args:
        engine: A value of `model_engine`; one without a flat file of its own has that of `dp`.
    """
    file = verl_root() / "trainer" / "config" / ENGINES.get(engine, ENGINES["dp"])
    return dict(leaves(yaml.safe_load(file.read_text(encoding="utf-8"))))


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of every setting below a node; an empty section is a setting."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, node


def all_keys() -> list[str]:
    """Return the settings of all flat files, sorted; not the class names (`_target_`), which are not settings."""
    keys = set().union(*map(defaults, ENGINES))
    return sorted(key for key in keys if not key.endswith("._target_"))


def without_entry() -> list[str]:
    """Return the settings that no line of the table fits."""
    return [key for key in all_keys() if entry_of(key) is None]


def faults() -> list[str]:
    """Return the faults of the table beside the installed verl, a sentence each; empty where all is well."""
    used: dict[VerlKey, list[str]] = {entry: [] for entry in entries()}
    told = [f"{key}: no line of the table fits it" for key in without_entry()]
    for key in all_keys():
        if (entry := entry_of(key)) is not None:
            used[entry].append(key)
        for typed in (each for each in used if each.kind == TYPE and each.fits(key)):
            used[typed].append(key)
    for entry, keys in used.items():
        told += [f"{key}: the line holds for no setting" for key in _unused(entry, keys)]
        if entry.weight and (entry.weight not in (REFUSE, TELL) or not entry.remedy or "*" in entry.pattern):
            told.append(f"{entry.pattern}: a reason needs refuse or tell before it, a remedy, and a pattern without *")
        if entry.kind != TYPE:
            told += _unread_faults(entry, keys) if entry.kind == "unread" else _reader_faults(entry, keys)
    return told


def _unused(entry: VerlKey, keys: list[str]) -> Iterator[str]:
    """Yield the patterns of an entry that fit none of the settings."""
    for each in entry.settings():
        if not any(_expression(each).fullmatch(key) for key in keys):
            yield each


def trace_faults(reads: Iterable[tuple[str, str]]) -> list[str]:
    """Return where a traced run read other settings than the table has, a sentence each.

    Args:
        reads: Setting and reading file, as `tests/support/config_trace.py` notes them; the setting of a dataclass is
            `~CLASS.FIELD`. A setting that the start-up check reads counts as unread.
    """
    readers: dict[str, set[str]] = {}
    for setting, file in reads:
        if not file.startswith("verl_multiturn/verl_bridge/startup/"):
            readers.setdefault(setting, set()).add(file)
    flat, told = defaults("dp"), []
    for key in (key for key in all_keys() if key in flat):
        entry, (section, _, name) = entry_of(key), key.rpartition(".")
        as_field = f"~{str(flat.get(f'{section}._target_')).rpartition('.')[2]}.{name}"
        found = readers.get(key, set()) | readers.get(as_field, set())
        if entry is not None and entry.kind == "always" and not found:
            told.append(f"{key}: said to be read always, and nothing read it")
        if entry is not None and entry.kind == "unread":
            # A definition reads its own fields when it is built, and a class may be that of a section that is read.
            users = {file for file in readers.get(key, set()) if not file.startswith("workers/config/")}
            told += [f"{key}: said to be unread, and {file} read it" for file in sorted(users - set(entry.places))]
    return told


def _reader_faults(entry: VerlKey, keys: list[str]) -> Iterator[str]:
    if entry.kind not in ("always", "read"):
        yield f"{entry.pattern}: unknown kind {entry.kind!r}"
    needed = set()
    for key in keys:
        name = key.rpartition(".")[2]
        reader = {place for place in entry.places if _stands(place, name)}
        needed |= reader
        if not reader:
            yield f"{key}: its name stands in none of its places ({', '.join(entry.places)})"
    for place in set(entry.places) - needed if keys else ():
        yield f"{entry.pattern}: nothing that it holds for stands in {place}"


def _unread_faults(entry: VerlKey, keys: list[str]) -> Iterator[str]:
    if entry.places == ("*",):
        return
    for key in keys:
        name = key.rpartition(".")[2]
        named = {file for file, names in _names_in_scope().items() if name in names}
        for file in sorted(named - set(entry.places)):
            yield f"{key}: said to be unread, and {file} now names it"
        for file in sorted(set(entry.places) - named):
            yield f"{key}: {file} does not name it any more"


def _stands(place: str, name: str) -> bool:
    file, _, text = place.partition(":")
    content = _text(file)
    if not text:
        return name in _names(content)
    return (f"{text}{name}" if text.endswith(".") else text) in content


@functools.cache
def _text(file: str) -> str:
    path = (_OURS if file.startswith("verl_multiturn/") else verl_root()) / file
    return path.read_text(encoding="utf-8") if path.is_file() else ""


@functools.cache
def _names(content: str) -> frozenset[str]:
    quoted = [(attribute or text) for attribute, text in _NAMED.findall(content)]
    return frozenset(part for text in quoted for part in (text, *text.split(".")))


@functools.cache
def _names_in_scope() -> dict[str, frozenset[str]]:
    files = (path.relative_to(verl_root()).as_posix() for path in verl_root().rglob("*.py"))
    return {file: _names(_text(file)) for file in files if not any(fnmatchcase(file, out) for out in _ELSEWHERE)}
