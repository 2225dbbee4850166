"""A headless Chromium (Debian's `chromium` and `chromium-driver`) for tests of pages on this machine."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "no chromium or chromedriver here: apt-get install chromium chromium-driver"

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--no-proxy-server", "--force-color-profile=srgb",
)  # fmt: skip


class Browser:
    """One browser with an empty profile; what its pages log and ask for is kept until it is taken."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver
        self._requested: list[tuple[str, str]] = []
        """The browser's own names of requests, and their addresses."""
        self._pieces: Counter[str] = Counter()

    def open(self, url: str) -> None:
        self.driver.get(url)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def find_all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """Return an element's text, read in one step: the page changes under our hands."""
        return str(
            self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        )

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def set_size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, **features: str) -> None:
        """Set media features, such as `prefers_color_scheme="dark"`."""
        told = [{"name": n.replace("_", "-"), "value": v} for n, v in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": told})

    def errors(self) -> list[str]:
        """Return what the console has shown as wrong since it was last asked."""
        entries: list[dict[str, Any]] = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def requested(self) -> list[str]:
        """Return every address that a page has asked for so far."""
        self._read_network()
        return [url for _, url in self._requested]

    def pieces_of(self, url: str) -> int:
        """Return in how many pieces answers of an address have come so far."""
        self._read_network()
        names = {name for name, requested in self._requested if requested == url}
        return sum(self._pieces[name] for name in names)

    def _read_network(self) -> None:
        entries: list[dict[str, Any]] = self.driver.get_log("performance")  # type: ignore[no-untyped-call]
        for entry in entries:
            message = json.loads(entry["message"])["message"]
            name = message["params"].get("requestId", "")
            if message["method"] == "Network.requestWillBeSent":
                self._requested.append((name, message["params"]["request"]["url"]))
            elif message["method"] == "Network.dataReceived":
                self._pieces[name] += 1


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Run a browser; it ends with the block."""
    assert CHROMIUM is not None, MISSING
    assert DRIVER is not None, MISSING
    options = Options()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
