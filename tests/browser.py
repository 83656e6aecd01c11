"""A real Chromium for tests of the page: Debian's, driven by playwright. It talks to this machine alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

PLACE = "SLIPSTREAM_CHROMIUM"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless",
    "--no-sandbox",  # it does not start as root otherwise; it sees nothing but this server's page
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


def executable() -> str:
    found = os.environ.get(PLACE) or next(filter(None, map(shutil.which, _NAMES)), None)
    assert found, f"the page's tests need a Chromium: apt-get install chromium, or name one in {PLACE}"
    return found


@contextmanager
def chromium() -> Iterator[Browser]:
    """One that knows nothing from before: its folder is new, and is removed at the end."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable(), args=list(_FLAGS), timeout=60_000)
        try:
            yield browser
        finally:
            browser.close()
