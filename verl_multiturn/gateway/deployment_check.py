"""`check_candidate`: refuses a model that cannot take the place of the one that serves, before a server is touched.

`Deployer` calls it, and `changed` before and after a server has loaded the model.

Invariants:
- the server loads no file of weights that is not in the model's hash;
- the models differ in nothing but the values of their weights and the precision in which their files hold them: the
  server keeps the configuration and the data type that it was started with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.describe import describe, show
from verl_multiturn.errors import ConfigError
from verl_multiturn.models.hash import model_hash, tensor_shapes, weight_files
from verl_multiturn.models.location import find_model
from verl_multiturn.records.write.run_file import digest_of_vocabulary

_FREE = (
    "_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "attn_implementation",
    "_attn_implementation", "attention_dropout", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
"""Entries of `config.json` in which models may differ: the server computes the same with them."""
_KIND = ("model_type", "architectures")
"""Entries that are named before others, which follow from them."""
_FLOATS = ("F64", "F32", "F16", "BF16")
"""Data types that the server casts to its own."""

Files = tuple[tuple[str, int, int, int, int], ...]
"""Name, inode, size and times of the files of weights, which tell whether they were written since."""


def files_of(folder: Path) -> Files:
    """Return the state of the files of weights in a folder.

    Raises:
        ConfigError: They are not whole, or the server would load others, too.
    """
    files = weight_files(folder)
    if len(files) == 1 and (others := sorted({*folder.glob("*.safetensors")} - {*files})):
        # Without an index SGLang loads every file of safetensors.
        raise ConfigError(
            f"{str(folder)!r} holds {others[0].name!r} beside {files[0].name!r}, and a server may load both; remove it"
        )
    found = []
    for path in files:
        try:
            about = path.stat()
        except OSError as error:
            raise ConfigError(f"{str(path)!r} cannot be read ({describe(error)}); write the folder again") from None
        found.append((path.name, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns))
    return tuple(found)


def changed(folder: Path, weights: str, files: Files | None) -> str:
    """Return why a folder may hold other weights than those with the model's hash; "": it does not.

    Args:
        folder: The model's folder.
        weights: Its hash.
        files: Its files as they were before the hash was computed.
    """
    try:
        if files == files_of(folder):
            return ""
        found = model_hash(folder)
    except (ConfigError, OSError) as error:
        return f"{str(folder)!r} changed while it was deployed: {describe(error)}"
    if found == weights:
        return ""
    return (
        f"{str(folder)!r} changed while it was deployed: its weights are {found} by now, and were {weights}; "
        "deploy a folder that nobody writes into"
    )


def check_candidate(new: Path, weights: str, served: Path, serves: str) -> tuple[Files, Files]:
    """Refuse a model that cannot take the place of the one that serves, or that could not be taken back.

    Args:
        new: Its folder.
        weights: The hash that it is to have.
        served: Folder of the model that serves.
        serves: Hash of that model.

    Returns:
        The states of the files of both, from before their hashes were computed.

    Raises:
        ConfigError: It cannot.
    """
    where = f"{str(new)!r}, as the server reads it"
    model = find_model(new)
    if model.ranks:
        raise ConfigError(
            f"{where}, is a checkpoint of {model.ranks} ranks; export it first (verl-multiturn export MODEL --to DIR)"
        )
    files = files_of(new)
    if (found := model_hash(new)) != weights:
        raise ConfigError(
            f"{where}, has the weights {found}, and {weights} were to be deployed; name the folder that both see"
        )
    _open_all(new)
    for name, mine, its in _differences(new, served):
        raise ConfigError(
            f"{where}, has another {name} than the model that serves: {show(mine, 120)} in the place of "
            f"{show(its, 120)}; deploy a model that was trained from it, or start a gateway with this one"
        )
    former = files_of(served)
    if (found := model_hash(served)) != serves:
        raise ConfigError(
            f"the folder of the model that serves, {str(served)!r}, has the weights {found} by now, and no more "
            f"{serves}, so that a deployment that fails could not be taken back; restart the gateway with the "
            "new model"
        )
    return files, former


def _open_all(folder: Path) -> None:
    """Refuse files that the library of safetensors does not open, as a server does.

    SGLang 0.5.12 ends where a file fails while it is loaded: it takes its weights back from the same file.

    Raises:
        ConfigError: It does not.
    """
    from safetensors import safe_open

    for path in weight_files(folder):
        try:
            with safe_open(path, "numpy"):
                pass
        except Exception as error:  # its own kind, and those of the file system
            raise ConfigError(f"{str(path)!r} cannot be loaded ({describe(error)}); write the folder again") from None


def _differences(new: Path, served: Path) -> list[tuple[str, Any, Any]]:
    """Return the parts in which two models differ beside the values of their weights: name, new, served."""
    configs = [_config(each) for each in (new, served)]
    names = sorted({*configs[0], *configs[1]}, key=lambda name: (name not in _KIND, name))
    found: list[tuple[str, Any, Any]] = [
        (f"{name} in config.json", configs[0].get(name), configs[1].get(name)) for name in names
    ]
    shapes = [
        {name: ("float" if dtype in _FLOATS else dtype, shape) for name, (dtype, shape) in tensor_shapes(each).items()}
        for each in (new, served)
    ]
    names = sorted(name for name in shapes[0].keys() | shapes[1].keys() if shapes[0].get(name) != shapes[1].get(name))
    found += [(f"tensor {name}", shapes[0].get(name), shapes[1].get(name)) for name in names[:1]]
    tokenizers = [_tokenizer(each) for each in (new, served)]
    own, former = (each.get_vocab() for each in tokenizers)
    found.append(("number of tokens", len(own), len(former)))
    found.append(("vocabulary", digest_of_vocabulary(own), digest_of_vocabulary(former)))
    found.append(("chat template", tokenizers[0].chat_template, tokenizers[1].chat_template))
    return [each for each in found if each[1] != each[2]]


def _config(folder: Path) -> Mapping[str, Any]:
    """Return what a model's `config.json` says about computing: in one spelling, with its architecture's own defaults.

    Raises:
        ConfigError: It cannot be read.
    """
    from transformers import AutoConfig

    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it holds {show(found, 100)}")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read ({describe(error)}); write the folder again") from None
    try:
        whole = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False).to_dict()
    except Exception:  # an architecture of its own code, or of another release: the file alone says what it is
        whole = found
    computing: Mapping[str, Any] = _computing(whole)
    return computing


def _computing(value: Any) -> Any:
    """Return a configuration without the entries in which models may differ, at each depth."""
    if not isinstance(value, dict):
        return value
    return {name: _computing(each) for name, each in value.items() if name not in _FREE}


def _tokenizer(folder: Path) -> Any:
    """Return a model's tokenizer, without its own code.

    Raises:
        ConfigError: It cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds, for damaged files
        raise ConfigError(f"{str(folder)!r} has no tokenizer that can be loaded ({describe(error)})") from error
