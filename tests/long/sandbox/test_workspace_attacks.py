"""No attack on a verdict is paid, and no rule distinguishes a decoy from the true value."""

import asyncio

import pytest

from tests.long.sandbox.workspace_attacks import run
from tests.support.workspace_attacks import VERDICTS


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_every_attack_with_every_verdict() -> None:
    figures = asyncio.run(run(None, list(VERDICTS), is_short=False))
    assert figures["holds"], figures
