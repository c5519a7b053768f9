"""Fixtures of several files of tests: models that take images, and a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.integration.vision import KINDS


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.integration.vision_models import save_processor

    folder = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        save_processor(folder / kind, kind)
    return folder


@pytest.fixture(scope="session")
def processors(models: Path) -> dict[str, Any]:
    """Return a processor of each kind of model, loaded as verl's workers load it."""
    from verl.utils.tokenizer import hf_processor

    return {kind: hf_processor(str(models / kind)) for kind in KINDS}


def start_ray(num_cpus: int) -> None:
    """Start a Ray cluster of this process, however long that takes: Ray itself gives up after 30 s."""
    import ray
    from ray._private import node

    slow = SimpleNamespace(**{**vars(time), "monotonic": lambda: time.monotonic() / 10})
    with mock.patch.object(node, "time", slow):
        ray.init(num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Start a Ray cluster of this process, and end it after the file's tests."""
    import ray

    start_ray(num_cpus=4)
    yield
    ray.shutdown()
