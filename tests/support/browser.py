"""A real browser for tests: Debian's chromium, or Chrome, with a new profile and no word to the network."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
WAIT_MS = 120_000
"""How long an event may take on a busy machine before a test gives up."""

CONTRAST = """
() => {
  const numbers = (colour) => {
    const found = colour.match(/[\\d.]+/g).map(Number);
    return colour.startsWith("color(") ? [...found.slice(-3).map((one) => 255 * one), 1] : [...found, 1].slice(0, 4);
  };
  const canvas = matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18] : [255, 255, 255];
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const [r, g, b, a] = numbers(getComputedStyle(at).backgroundColor);
      if (a === 1) return [r, g, b];
    }
    return canvas;
  };
  const linear = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  const light = (colour) => {
    const [r, g, b] = colour.map((one) => linear(one / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    const text = walk.currentNode.textContent.trim();
    if (!text || !element.checkVisibility() || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    const style = getComputedStyle(element);
    const colour = numbers(element.closest("svg") ? style.fill : style.color).slice(0, 3);
    const [one, other] = [light(colour), light(ground(element))].sort((a, b) => b - a);
    found.push([(one + 0.05) / (other + 0.05), text.slice(0, 40)]);
  }
  return found;
}
"""
"""Contrast of each piece of visible text with its ground, as WCAG 2 defines it."""

WIDER = """
() => [...document.body.querySelectorAll("*")]
  .filter((one) => one.checkVisibility() && !one.closest(".wide, svg"))
  .filter((one) => one.getBoundingClientRect().right > innerWidth + 0.5)
  .map((one) => one.outerHTML.slice(0, 80))
"""
"""Elements that end beyond the right edge of the window, apart from what scrolls by itself."""


@dataclass
class Watched:
    """A page, and what it has asked for and complained of."""

    page: Any
    errors: list[str] = field(default_factory=list)
    """Errors of scripts, and of the console."""
    requests: list[str] = field(default_factory=list)
    """Addresses, as the page asked for them."""

    def least_contrast(self) -> tuple[float, str]:
        """Returns the least contrast of a text with its ground, and the text."""
        return min(tuple(one) for one in self.page.evaluate(CONTRAST))

    def scrolls_sideways(self) -> bool:
        """Tells whether the page is wider than its window."""
        return self.page.evaluate("() => document.documentElement.scrollWidth > innerWidth")


@contextmanager
def chromium(profile: Path) -> Iterator[Any]:
    """Runs a browser with a profile of its own in the empty folder `profile`; skips the test where there is none."""
    if CHROMIUM is None:
        pytest.skip("no chromium is installed: apt-get install -y chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make env")
    with playwright.sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            profile, executable_path=CHROMIUM, headless=True, args=list(FLAGS), timeout=WAIT_MS
        )
        context.set_default_timeout(WAIT_MS)
        try:
            yield context
        finally:
            context.close()


@contextmanager
def opened(context: Any, address: str, width: int = 1280, height: int = 900) -> Iterator[Watched]:
    """Opens an address in a window of its own, and notes errors and requests from the first one on."""
    page = context.new_page()
    watched = Watched(page)
    page.on("pageerror", lambda error: watched.errors.append(str(error)))
    page.on("console", lambda said: watched.errors.append(said.text) if said.type in ("error", "warning") else None)
    page.on("request", lambda request: watched.requests.append(request.url))
    page.set_viewport_size({"width": width, "height": height})
    try:
        page.goto(address)
        yield watched
    finally:
        page.close()
