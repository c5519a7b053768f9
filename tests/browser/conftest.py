"""A Chromium of the system, and a page of it that records errors."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.view_samples import TOKENIZER, write_samples
from verl_multiturn.observe.documents.documents import Documents
from verl_multiturn.observe.view.export import export
from verl_multiturn.observe.view.server import ViewServer

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")  # not longer: as long as it is open, an event loop runs in this thread
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright: bash scripts/test.sh installs requirements/browser.lock"
    )
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium-headless-shell")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=300_000)
        yield started
        started.close()


class Watched:
    """A page, with its complaints and its requests."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on(
            "console", lambda said: self.complaints.append(said.text) if said.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: self.requests.append(request.url))
        page.set_default_timeout(60_000)


@pytest.fixture
def watched(browser: Any) -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    found = Watched(context.new_page())
    yield found
    context.close()
    assert not found.complaints


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("view") / "records"
    write_samples(path)
    return path


@pytest.fixture(scope="session")
def documents(folder: Path) -> Documents:
    made = Documents([folder], TOKENIZER)
    made.refresh()
    return made


@pytest.fixture(scope="session")
def exported(folder: Path, documents: Documents) -> str:
    file = folder.parent / "export.html"
    export(documents, file)
    return file.as_uri()


@pytest.fixture(scope="session")
def served(folder: Path) -> Iterator[str]:
    own = Documents([folder], TOKENIZER)
    own.refresh()
    server = ViewServer(own, follow=True)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield asyncio.run_coroutine_threadsafe(server.start(0), loop).result(60)
    asyncio.run_coroutine_threadsafe(server.aclose(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
    loop.close()
