"""`require_plain_model`: the files of a model are files of its folder, and name nothing that lies elsewhere.

Nothing is loaded here. Refused parts make a program read, fetch or run something beside the folder: links, pipes,
an adapter that names its base, an attention kernel of the hub, Python files of another repository.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError

WEIGHTS = (
    ".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5", ".msgpack",
    ".onnx", ".ot", ".ckpt",
)  # fmt: skip
"""Ends of the names of files of weights."""
_OF_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "processor_config.json")
_CONFIG, _ADAPTER = "config.json", "adapter_config.json"
_MOST_ENTRIES = 100_000
_MOST_BYTES = 64 << 20
"""Bytes of a file that is read whole, as configuration and tokenizer are."""
_CODE, _NAMES_CODE = (".py", ".pyc", ".so"), ("auto_map", "custom_pipelines")
"""Ends of the names of files of code, and the entries of a model's JSON that name them."""
_KERNELS = ("attn_implementation", "experts_implementation")


def require_plain_model(described: Path, folder: Path, root: Path) -> None:
    """Refuse a model whose files lead out of its folder, or make a program open something else.

    Args:
        described: Folder with `config.json` and the tokenizer.
        folder: Folder of the weights.
        root: Folder that links may lead to: the run's, or the model's own.

    Raises:
        ConfigError: There is such a file.
    """
    for each in dict.fromkeys((folder, described)):
        require_plain_files(each, root)
    if (described / _ADAPTER).is_file():
        raise ConfigError(
            f"{str(described / _ADAPTER)!r} lies beside a whole model, and transformers would load the base that it "
            "names in its place; remove it"
        )
    for name in _OF_TOKENIZER:
        _require_own_names(described / name)
    config = _read(described / _CONFIG)
    for key, value in _entries(config):
        if any(name in key for name in _KERNELS) and "/" in str(value):
            raise ConfigError(
                f"{str(described / _CONFIG)!r} names the kernel {show(str(value))}, which transformers would fetch and "
                f"run; remove {show(key)}"
            )
        if key == "auto_map" and "--" in str(value):
            raise ConfigError(
                f"{str(described / _CONFIG)!r} names Python files of another repository, which would be fetched and "
                f"run: {show(str(value))}; put the files into the folder, or remove 'auto_map'"
            )


def _require_own_names(path: Path) -> None:
    """Refuse a tokenizer's configuration that names a file which is not beside it.

    Raises:
        ConfigError: It does.
    """
    for key, value in _entries(_read(path)):
        if not (key.endswith("_file") and isinstance(value, str) and os.path.isfile(os.path.expanduser(value))):
            continue  # older versions of transformers noted where a file lay that is not here
        if not Path(os.path.realpath(os.path.expanduser(value))).is_relative_to(os.path.realpath(path.parent)):
            raise ConfigError(
                f"{str(path)!r} names {show(value)} as its {show(key)}, which lies elsewhere; put the file into the "
                "folder, and its name alone there"
            )


def require_plain_folder(folder: Path) -> None:
    """Refuse a Hugging Face folder as `require_plain_model` does; the loader decides about a name of the hub.

    Args:
        folder: The folder.

    Raises:
        ConfigError: Its files lead out of it, or make a program open something else.
    """
    if folder.is_dir():
        require_plain_model(folder, folder, folder)


def require_plain_files(folder: Path, root: Path) -> None:
    """Refuse a link that leads out of a folder, a pipe, a socket, a device, and a text that would fill the memory.

    The links of Hugging Face's cache, from `snapshots/…` into the `blobs` beside, are allowed.

    Args:
        folder: The folder; all below it is looked at, and no link is followed.
        root: Folder that its links may lead to.

    Raises:
        ConfigError: There is one.
    """
    places = [root.resolve()]
    whole = folder.resolve()
    places += [each.parent / "blobs" for each in whole.parents if each.name == "snapshots"]
    for path in _below(folder):
        try:
            target, found = path.resolve(), path.stat()
        except (OSError, RuntimeError):
            raise ConfigError(f"{show(str(path))} is a link that leads nowhere; remove it") from None
        if not any(target.is_relative_to(place) for place in places):
            raise ConfigError(
                f"{show(str(path))} is a link that leads out of the folder, to {show(str(target))}; put a copy in its "
                "place, or remove it"
            )
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"{show(str(path))} is no file, but a pipe, a socket or a device; remove it")
        if stat.S_ISREG(found.st_mode) and found.st_size > _MOST_BYTES and not path.name.endswith(WEIGHTS):
            raise ConfigError(
                f"{show(str(path))} has {found.st_size / 1e6:,.0f} MB, and a file beside the weights at most "
                f"{_MOST_BYTES / 1e6:.0f}; remove it"
            )


def remove_code(folder: Path) -> list[str]:
    """Remove Python files from a model's folder, and the entries that name them, and return their names.

    A later load with `trust_remote_code` takes it for a model of the user's own.

    Args:
        folder: The folder, which the user has made; its own files are looked at.
    """
    found = []
    for path in sorted(folder.iterdir()):
        if path.name.endswith(_CODE):
            path.unlink()
            found.append(show(path.name))
        elif path.name.endswith(".json") and path.stat().st_size <= _MOST_BYTES:
            value = _read(path)
            named = [key for key in _NAMES_CODE if isinstance(value, dict) and key in value]
            if named:
                kept = {key: item for key, item in value.items() if key not in named}
                path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
                found += [f"{key} of {show(path.name)}" for key in named]
    return found


def _below(folder: Path) -> Iterator[Path]:
    count = 0
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            count += 1
            if count > _MOST_ENTRIES:
                raise ConfigError(f"{str(folder)!r} has more than {_MOST_ENTRIES:,} files; expected those of a model")
            yield Path(place, name)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return None  # its loader reports it
    except (ValueError, RecursionError) as error:  # of great depth, or of a number with 100,000 digits
        raise ConfigError(f"{str(path)!r} cannot be read as JSON ({error}); name another folder") from None


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of mappings, to any depth."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key), item
            yield from _entries(item)
    elif isinstance(value, list):
        for item in value:
            yield from _entries(item)
