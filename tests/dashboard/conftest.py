"""Servers of the dashboard as processes of their own, and one browser for all tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.dashboard.server import Server

CHROMIUM = "/usr/bin/chromium"


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Starts servers, and ends them after the test."""
    with contextlib.ExitStack() as stack:

        def start(root: Path, *options: str) -> Server:
            server = Server(root, *options)
            stack.callback(server.stop)
            return server

        yield start


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's chromium, without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A fresh page; an error of its scripts fails the test."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    page = context.new_page()
    page.set_default_timeout(15_000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    context.close()
    assert errors == []
