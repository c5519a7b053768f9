"""Fixtures of the tests with images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
