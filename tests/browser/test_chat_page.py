"""The chat page of `coldpress serve` in a real browser: a user writes, text streams in, stops, is asked for again."""

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


@pytest.fixture(scope="module")
def still(browser, artifact):
    """The page of a server that nothing is asked of, for what the page does by itself."""
    with serving_here(artifact.path) as server, opened(browser, server.url) as shown:
        yield shown.page


def amount(count):
    """Bytes as the page shows them: three digits, in powers of a thousand."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            whole = len(str(int(count / size)))
            return f"{count / size:.{max(0, 3 - whole)}f} {unit}"
    return f"{count:g} B"


def wait_for(page, expression, *given):
    """Waits until JavaScript is true of the page."""
    page.wait_for_function(expression, arg=list(given), timeout=WAIT_MS)


def settle(page, *, most=None, temperature="0"):
    """Opens the settings, sets them, and folds them away."""
    page.click("#fold")
    page.fill("#temperature", temperature)
    if most is not None:
        page.fill("#most", str(most))
    page.click("#fold")


def send(page, text, *, by_key=False):
    page.fill("#text", text)
    if by_key:
        page.press("#text", "Enter")
    else:
        page.click("#send")


def answers(page):
    return [text.strip() for text in page.locator(".assistant .text").all_inner_texts()]


ANSWER = "([number, least]) => (document.querySelectorAll('.assistant')[number]?.source.length ?? 0) > least"
IDLE = "() => document.getElementById('send').textContent === 'Send'"
COST = "([words]) => document.querySelector('.assistant:last-child .cost').textContent.includes(words)"
SOURCE = "() => document.querySelector('.assistant:last-child').source"


@pytest.mark.slow
def test_a_user_chats_stops_and_chats_on(browser, served):
    server, gate = served
    with opened(browser, server.url) as shown:
        page, bodies = shown.page, []
        page.on("request", lambda request: bodies.append(request.post_data) if request.method == "POST" else None)
        wait_for(page, "() => document.getElementById('name').textContent === 'tiny'")
        assert page.locator("#empty").is_visible()
        settle(page, most=400)
        send(page, "Once")
        assert not page.locator("#empty").is_visible()
        assert page.locator("#send").inner_text() == "Stop"
        assert page.locator(".user").inner_text() == "Once"
        assert answers(page) == [""], "no pass was allowed yet"
        gate.allow(9)
        wait_for(page, ANSWER, 0, 0)
        first = page.evaluate(SOURCE)
        gate.allow(20)
        wait_for(page, ANSWER, 0, len(first))
        assert page.evaluate(SOURCE).startswith(first)

        send(page, "The map was", by_key=True)  # it neither stops the answer nor loses the text
        assert page.locator("#send").inner_text() == "Stop"
        assert page.input_value("#text") == "The map was"
        page.press("#text", "Escape")
        wait_for(page, IDLE)
        gate.allow(2)
        found = server.wait_for(lambda now: now["running"] == 0)
        assert found["cancelled_total"] == 1
        assert found["new_tokens_total"] < 40, "of 400"
        stopped = page.evaluate(SOURCE)
        wait_for(page, COST, "stopped")

        page.press("#text", "Enter")
        assert page.input_value("#text") == ""
        gate.open()
        wait_for(page, IDLE)
        wait_for(page, ANSWER, 1, 0)
        assert page.locator(".user").all_inner_texts() == ["Once", "The map was"]
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


@pytest.mark.slow
def test_an_answer_says_what_it_cost_and_is_asked_for_again(browser, served):
    """Against the server's own numbers."""
    server, gate = served
    gate.open()
    with opened(browser, server.url) as shown:
        page = shown.page
        settle(page, most=12)
        page.click("#fold")
        page.fill("#system", "Be brief.")
        send(page, "Once")
        wait_for(page, IDLE)
        wait_for(page, COST, "tokens/s")
        now, told = server.metrics(), page.locator(".cost").inner_text()
        assert amount(now["read_bytes_total"]) + " read from flash" in told
        assert "12 tokens" in told
        assert f"{now['hit_rate']:.0%}".replace("%", " %") in told
        assert told.endswith("cut at the longest answer")
        assert page.locator("#state").inner_text().endswith(" of 512 tokens used")
        first = page.evaluate(SOURCE)
        with page.expect_request("**/v1/chat/completions") as asked:
            page.click(".retry")
        assert [each["content"] for each in asked.value.post_data_json["messages"]] == ["Be brief.", "Once"]
        wait_for(page, IDLE)
        wait_for(page, COST, "tokens/s")
        assert (page.evaluate(SOURCE), len(answers(page))) == (first, 1)
        page.click("#clear")
        assert page.locator("#empty").is_visible()
        assert page.locator(".user, .assistant").count() == 0
        assert shown.errors == []


@pytest.mark.slow
def test_a_refusal_is_told_at_the_answer_and_the_next_message_takes_its_place(browser, served):
    server, gate = served
    gate.open()
    with opened(browser, server.url) as shown:
        page = shown.page
        wait_for(page, "() => document.getElementById('most').max === '512'")
        settle(page, most=999999)
        send(page, "Once")
        page.wait_for_selector(".error:visible")
        assert page.locator(".error").inner_text().endswith("give a smaller “longest answer” in the settings.")
        wait_for(page, IDLE)
        settle(page, most=3)
        send(page, "The map")
        wait_for(page, IDLE)
        wait_for(page, ANSWER, 0, 0)
        assert page.locator(".user").all_inner_texts() == ["The map"]
        assert page.locator(".error:visible").count() == 0


def test_a_key_is_asked_for_only_by_a_server_that_wants_one(browser, artifact):
    with serving_here(artifact.path, key="secret") as server, opened(browser, server.url) as shown:
        page = shown.page
        page.wait_for_selector("#key:visible")
        page.fill("#key", "secret")
        page.press("#key", "Tab")
        wait_for(page, "() => document.getElementById('name').textContent === 'tiny'")
        assert [text for text in shown.errors if "401" not in text] == []


def test_settings_are_folded_away_and_the_input_fills_the_column(still):
    assert not still.locator("#settings").is_visible()
    assert not still.locator("#key").is_visible()
    assert still.locator("#text").bounding_box()["width"] > 600
    still.press("#fold", "Enter")
    assert still.locator("#settings").is_visible()
    assert not still.locator("#key").is_visible(), "the server asks for none"
    still.press("#fold", "Enter")
    unnamed = "() => [...document.querySelectorAll('input, textarea')].filter((one) => !one.labels.length).length"
    assert still.evaluate(unnamed) == 0


DRAW = "([text]) => { const into = document.createElement('div'); draw(into, text); return into.innerHTML; }"
CODE = '<div class="code"><div><span class="soft">{}</span><button type="button" aria-label="Copy this code">Copy</button></div><pre><code>{}</code></pre></div>'  # noqa: E501
LINK = '<a href="{}" target="_blank" rel="noopener noreferrer nofollow">{}</a>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One\ntwo\n\nthree", "<p>One\ntwo</p><p>three</p>"),
        ("# A\n### B #\ntext", "<h3>A</h3><h5>B</h5><p>text</p>"),
        ("**a *b* c** ***d*** _e_ ~~f~~", "<p><strong>a <em>b</em> c</strong> <strong><em>d</em></strong> <em>e</em> <del>f</del></p>"),  # noqa: E501
        ("snake_case_name 2 * 3 * 4 **open `too", "<p>snake_case_name 2 * 3 * 4 **open `too</p>"),
        (r"`a *b*` ``c`d`` \*e\*", "<p><code>a *b*</code> <code>c`d</code> *e*</p>"),
        ("- a\n  - b\n- c\n\nd", "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul><p>d</p>"),
        ("3. a\n4. b\n   more", '<ol start="3"><li>a</li><li>b\nmore</li></ol>'),
        ("1. a\n  - b\n\n2. c", '<ol start="1"><li>a<ul><li>b</li></ul></li><li>c</li></ol>'),
        ("> a\n> - b", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>"),
        ("a\n***\nb", "<p>a</p><hr><p>b</p>"),
        ("```py\nif a < 2:\n    *b*\n```\nc", CODE.format("py", "if a &lt; 2:\n    *b*") + "<p>c</p>"),
        ("~~~\n```\n~~~", CODE.format("text", "```")),
        ("```py\nnot ended", CODE.format("py", "not ended")),
        ("```", CODE.format("text", "")),
        ("- a\n  ```\n  b\n  ```", f"<ul><li>a{CODE.format('text', 'b')}</li></ul>"),
        ("| a | b |\n|---|:-:|\n| *c* | |", '<div class="table"><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td><em>c</em></td><td></td></tr></tbody></table></div>'),  # noqa: E501
        ("a | b", "<p>a | b</p>"),
        ("[a](https://b.c/d_(e) \"f\") <https://g.h> https://i.j.", f"<p>{LINK.format('https://b.c/d_(e)', 'a')} {LINK.format('https://g.h', 'https://g.h')} {LINK.format('https://i.j', 'https://i.j')}.</p>"),  # noqa: E501
        ("[a](javascript:alert(1)) [b](data:text/html,x) [c](/admin/dram)", "<p>[a](javascript:alert(1)) [b](data:text/html,x) [c](/admin/dram)</p>"),  # noqa: E501
        ("![a](https://b.c/d.png)", f"<p>{LINK.format('https://b.c/d.png', 'a')}</p>"),
        ("<img src=x onerror=alert(1)>", "<p>&lt;img src=x onerror=alert(1)&gt;</p>"),
    ],
)  # fmt: skip
def test_markdown_is_shown_as_such_and_never_as_html(still, text, expected):
    assert still.evaluate(DRAW, [text]) == expected


def test_text_that_streams_in_ends_as_the_whole_does_and_keeps_what_has_not_changed(still):
    text = "# A\n\nOne **two**\n\n```py\na = [1]\n```\n\n1. b\n   - c\n2. d\n\n| a |\n|---|\n| b |\n\n" * 2
    found = still.evaluate(
        """([text]) => {
          const into = document.createElement('div'), heads = new Set();
          for (let end = 1; end <= text.length; end++) {
            draw(into, text.slice(0, end));
            if (end > 9) heads.add(into.firstChild);
          }
          return [into.innerHTML, heads.size];
        }""",
        [text],
    )
    assert found == [still.evaluate(DRAW, [text]), 1]


def test_no_text_of_a_model_takes_long(still):
    """Marks that open and never close, as a small model writes them."""
    took_s = "([text]) => { const begun = performance.now(); draw(document.createElement('div'), text); return (performance.now() - begun) / 1000; }"  # noqa: E501
    plain = still.evaluate(took_s, ["word " * 4000])
    for mark in ("*", "**", "_", "`", "~~", "[", "[a](", "<https://", "- ", "> ", "|", "1. a\n"):
        assert still.evaluate(took_s, [(mark + "a ") * 2000]) < 5 + 100 * plain, mark


@pytest.mark.slow
def test_copying_takes_the_source(browser, served):
    server, gate = served
    gate.open()
    browser.grant_permissions(["clipboard-read", "clipboard-write"])
    with opened(browser, server.url) as shown:
        page = shown.page
        settle(page, most=9)
        send(page, "Once")
        wait_for(page, IDLE)
        page.click(".of-answer:not(.retry)")
        wait_for(page, "() => document.querySelector('.of-answer').textContent === 'Copied'")
        assert page.evaluate("() => navigator.clipboard.readText()") == page.evaluate(SOURCE)
        page.evaluate("() => draw(document.querySelector('.text'), '```py\\na\\n  b\\n```')")
        page.click(".code button")
        wait_for(page, "() => document.querySelector('.code button').textContent === 'Copied'")
        assert page.evaluate("() => navigator.clipboard.readText()") == "a\n  b"


LONG = (
    "## A\n\n1. b `c`\n\n| long word | "
    + "x" * 90
    + " |\n|---|---|\n| a | b |\n\n```\n"
    + "y" * 300
    + "\n```\n[d](https://e.f)\n> g"
)


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_the_screen_and_can_be_read(browser, served, width, scheme):
    server, gate = served
    gate.open()
    with opened(browser, server.url, width) as shown:
        page = shown.page
        page.emulate_media(color_scheme=scheme)
        settle(page, most=9)
        least, text = shown.least_contrast()
        assert least >= READABLE, text
        send(page, "A long word: " + "x" * 200)
        wait_for(page, IDLE)
        page.evaluate("([text]) => draw(document.querySelector('.text'), text)", [LONG])
        page.evaluate(
            "() => Object.assign(document.querySelector('.error'), { hidden: false, textContent: 'a refusal' })"
        )
        page.click("#fold")
        assert not shown.scrolls_sideways()
        wide = "() => document.querySelectorAll('pre, .table').forEach((one) => one.classList.add('wide'))"
        page.evaluate(wide)  # these scroll by themselves
        assert page.evaluate(WIDER) == []
        least, text = shown.least_contrast()
        assert least >= READABLE, text
