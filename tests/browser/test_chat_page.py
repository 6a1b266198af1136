"""The chat page of `coldpress serve` in a real browser: a user writes, text streams in, numbers change, Stop stops."""

import json
import threading

import pytest

from tests.browser.test_report_page import READABLE
from tests.server.conftest import TEMPLATE
from tests.support.browser import WAIT_MS, WIDER, opened
from tests.support.command_line import speaking_artifact
from tests.support.serving import serving_here


class Gate:
    """Stands where a session holds its lock for a pass, and lets as many passes through as a test allows."""

    def __init__(self):
        self._permits, self._open = threading.Semaphore(0), threading.Event()

    def allow(self, passes):
        self._permits.release(passes)

    def open(self):
        self._open.set()
        self.allow(1)

    def __enter__(self):
        self._permits.acquire()
        if self._open.is_set():
            self.allow(1)

    def __exit__(self, *_):
        return None


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """A small model that reads flash: its plan holds a part of it."""
    shape = {"num_hidden_layers": 4, "max_position_embeddings": 512}
    return speaking_artifact(tmp_path_factory.mktemp("spoken"), context_length=512, template=TEMPLATE, **shape)


@pytest.fixture
def served(artifact):
    """A server whose passes the test allows one by one."""
    with serving_here(artifact.path) as server:
        gate = Gate()
        server.served.worker._session.step = gate
        yield server, gate
        gate.open()


def amount(count):
    """Bytes as the page shows them: three digits, in powers of a thousand."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            whole = len(str(int(count / size)))
            return f"{count / size:.{max(0, 3 - whole)}f} {unit}"
    return f"{count:g} B"


def value(page, name):
    """What an output of the page's head shows."""
    return page.locator(f"#{name}").evaluate("one => one.value")


def wait_for(page, expression, *given):
    """Waits until JavaScript is true of the page."""
    page.wait_for_function(expression, arg=list(given), timeout=WAIT_MS)


def send(page, text, *, by_key=False):
    page.fill("#text", text)
    if by_key:
        page.press("#text", "Enter")
    else:
        page.click("#send")


ANSWER = "([number, least]) => (document.querySelectorAll('.assistant')[number]?.textContent.length ?? 0) > least"
IDLE = "() => document.getElementById('send').textContent === 'Send'"


def test_a_user_chats_stops_and_chats_on(browser, served):
    server, gate = served
    with opened(browser, server.url) as shown:
        page, bodies = shown.page, []
        page.on("request", lambda request: bodies.append(request.post_data) if request.method == "POST" else None)
        wait_for(page, "() => document.getElementById('name').textContent === 'tiny'")
        page.fill("#temperature", "0")
        page.fill("#most", "400")
        send(page, "Once")
        assert page.locator("#send").inner_text() == "Stop"
        assert page.locator(".user").inner_text() == "Once"
        assert page.locator(".assistant").inner_text() == "", "no pass was allowed yet"
        gate.allow(9)
        wait_for(page, ANSWER, 0, 0)
        first = page.locator(".assistant").inner_text()
        gate.allow(20)
        wait_for(page, ANSWER, 0, len(first))
        assert page.locator(".assistant").inner_text().startswith(first)

        page.click("#send")  # it stops the answer
        wait_for(page, IDLE)
        gate.allow(2)
        found = server.wait_for(lambda now: now["running"] == 0)
        assert found["cancelled_total"] == 1
        assert found["new_tokens_total"] < 40, "of 400"
        stopped = page.locator(".assistant").inner_text()

        send(page, "The map was", by_key=True)
        gate.open()
        wait_for(page, IDLE)
        wait_for(page, ANSWER, 1, 0)
        assert [page.locator(".user").nth(number).inner_text() for number in range(2)] == ["Once", "The map was"]
        assert page.locator(".assistant").first.inner_text() == stopped
        asked = [json.loads(body) for body in bodies]
        assert [[message["role"] for message in body["messages"]] for body in asked] == [
            ["user"],
            ["user", "assistant", "user"],
        ]
        assert asked[1]["messages"][1]["content"] == stopped
        assert shown.errors == []
        assert {address.removeprefix(server.url).partition("?")[0] for address in shown.requests} <= {
            "/", "/metrics", "/v1/models", "/v1/chat/completions", "data:,",
        }  # fmt: skip


def test_speed_hits_and_bytes_change_while_tokens_stream(browser, served):
    """Against the server's own numbers, between passes that the test allows."""
    server, gate = served
    with opened(browser, server.url) as shown:
        page = shown.page
        wait_for(page, "() => document.getElementById('name').textContent === 'tiny'")
        wait_for(page, "() => document.getElementById('rate').value === '0'")
        before = value(page, "bytes")
        send(page, "Once")
        gate.allow(12)
        wait_for(page, "() => Number(document.getElementById('rate').value) > 0")
        wait_for(page, "([before]) => document.getElementById('bytes').value !== before", before)
        wait_for(page, "() => /^\\d+\\.\\d %$/.test(document.getElementById('hits').value)")
        now = server.metrics()
        assert now["hits_total"] > 0
        assert now["misses_total"] > 0
        wait_for(page, "([bytes]) => document.getElementById('bytes').value === bytes", amount(now["read_bytes_total"]))
        assert value(page, "dram") == amount(now["dram_used_bytes"])
        at_first = value(page, "bytes")
        gate.allow(12)
        wait_for(page, "([before]) => document.getElementById('bytes').value !== before", at_first)
        assert server.metrics()["read_bytes_total"] > now["read_bytes_total"]
        gate.open()
        wait_for(page, IDLE)
        wait_for(page, "() => document.getElementById('rate').value === '0'")
        assert shown.errors == []


def test_a_refusal_is_a_line_of_the_chat(browser, served):
    server, gate = served
    gate.open()
    with opened(browser, server.url) as shown:
        page = shown.page
        page.fill("#most", "999999")
        send(page, "Once")
        page.wait_for_selector(".error")
        assert "expected" in page.locator(".error").inner_text()
        page.fill("#most", "3")
        send(page, "Once")
        wait_for(page, IDLE)
        wait_for(page, ANSWER, 0, 0)
        assert page.locator(".assistant").count() == 1


@pytest.mark.parametrize("width", [360, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_the_screen_and_can_be_read(browser, served, width, scheme):
    server, gate = served
    gate.open()
    with opened(browser, server.url, width) as shown:
        page = shown.page
        page.emulate_media(color_scheme=scheme)
        page.fill("#most", "40")
        send(page, "A long word: " + "x" * 200)
        wait_for(page, ANSWER, 0, 0)
        wait_for(page, IDLE)
        page.evaluate("() => say('error', 'what a refusal looks like')")
        assert not shown.scrolls_sideways()
        assert page.evaluate(WIDER) == []
        least, text = shown.least_contrast()
        assert least >= READABLE, text
