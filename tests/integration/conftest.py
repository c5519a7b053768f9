"""Fixtures of several files of tests: a store, imports in a fork, models that take images, and a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.trainer_rows import WritableStore, put_in_place
from tests.support.config_files import read_once
from tests.support.warm_python import stack_python, start_ray, stop_ray

read_once()


@pytest.fixture(scope="session", autouse=True)
def verl_first() -> None:
    """Import verl before a test replaces parts that its plugin fills, such as the hooks of a platform."""
    import verl  # noqa: F401


class _Made(dict[str, Any]):
    """Objects by name, made at the first look-up, since each takes seconds."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> Any:
        self[name] = made = self._make(name)
        return made


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> WritableStore:
    """Put a store into the place of TransferQueue, and return it; some files have one of their own, with rows."""
    made = WritableStore()
    put_in_place(made, monkeypatch)
    return made


@pytest.fixture
def imports_in_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the start-up check import an author's code in a fork: a new Python takes up to 8 s of CPU for verl."""
    from verl_multiturn.runs import imports

    monkeypatch.setattr(imports, "_COMMAND", [stack_python(), *imports._COMMAND[1:]])


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of a processor of each kind of model, `KINDS`."""
    from tests.integration.vision_models import save_processor

    folder = tmp_path_factory.mktemp("models")

    def saved(kind: str) -> Path:
        save_processor(folder / kind, kind)
        return folder / kind

    return _Made(saved)


@pytest.fixture(scope="session")
def processors(models: dict[str, Path]) -> dict[str, Any]:
    """Return a processor of each kind of model, loaded as verl's workers load it."""
    from verl.utils.tokenizer import hf_processor

    return _Made(lambda kind: hf_processor(str(models[kind])))


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Start a Ray cluster of this process for all tests that end processes of Ray (the mark `deaths`).

    Actors die with their handles, so a file finds nothing of another's but the keeper of slots.
    """
    start_ray(num_cpus=4)
    yield
    stop_ray()


@pytest.fixture
def queue(cluster: None) -> Iterator[Any]:
    """Start TransferQueue in the cluster, with one unit of storage."""
    import transfer_queue
    from omegaconf import OmegaConf

    transfer_queue.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield transfer_queue
    transfer_queue.close()
