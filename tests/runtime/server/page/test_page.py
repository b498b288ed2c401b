"""The page in a real browser, in front of a scripted engine."""

import threading
import time

import pytest

from optimc_runtime.server import HttpServer, ServerOptions, build_app
from optimc_runtime.server.keys import KeyRing

ANSWER = "document.querySelector('#turns .assistant:last-child')"
IDLE = "document.querySelector('#stop').disabled"


def ask(browser, question):
    browser.evaluate("document.querySelector('#prompt').focus()")
    browser.type(question + "\n")


def answered(browser, text):
    browser.wait_for(f"{IDLE} && {ANSWER}?.textContent === {text!r}")


@pytest.fixture
def page(browser, served):
    """The page of the shared server, open; at the end nobody complained and nobody else was called."""
    browser.open(f"{served.url}/")
    browser.wait_for("document.querySelector('#running').textContent !== '–'")
    yield browser
    assert browser.complaints == []
    assert browser.requested
    assert all(url.startswith((f"{served.url}/", "data:")) for url in browser.requested)


def test_an_answer_streams_and_its_figures_are_the_servers(page, served, script):
    served.engine.script = script(pieces=["one ", "two ", "three"], delay_s=0.2)
    started = time.monotonic()
    ask(page, "count")
    page.wait_for(f"{ANSWER}?.textContent === 'one '")
    page.wait_for(f"{ANSWER}.textContent === 'one two '")
    answered(page, "one two three")
    assert time.monotonic() - started > 0.6
    [entry] = served.engine.submitted
    assert page.text("#tokens") == str(entry.sent_tokens)
    assert page.text("#hits") == f"4 of {len(entry.prompt)}"
    ttft_ms, tpot_ms, rate = (float(page.text(name).removesuffix(" ms")) for name in ("#ttft", "#tpot", "#rate"))
    assert ttft_ms >= 200
    # Three more increments of 0.2 s each, the last of which is the end alone.
    assert (entry.sent_tokens - 1) * tpot_ms >= 550
    assert rate == pytest.approx(1000 / tpot_ms, rel=0.05)


def test_a_conversation_goes_on_until_it_is_cleared(page, served, script):
    served.engine.script = script(pieces=["yes"])
    ask(page, "first")
    answered(page, "yes")
    ask(page, "second")
    page.wait_for(f"document.querySelectorAll('#turns .assistant').length === 2 && {IDLE}")
    sent = [(message["role"], message["content"]) for message in served.template.seen[-1]]
    assert sent == [("user", "first"), ("assistant", "yes"), ("user", "second")]
    page.click("#clear")
    ask(page, "third")
    answered(page, "yes")
    assert [message["content"] for message in served.template.seen[-1]] == ["third"]


def test_stop_aborts_in_the_engine_and_keeps_what_came(page, served, script):
    served.engine.script = script(pieces=["a"] * 200, delay_s=0.05)
    ask(page, "go on")
    page.wait_for(f"{ANSWER}?.textContent.startsWith('aa')")
    page.click("#stop")
    [entry] = served.engine.submitted
    assert entry.aborted.wait(5)
    page.wait_for(IDLE)
    assert page.text("#turns .assistant.cut").startswith("aa")
    assert page.evaluate("document.querySelector('#notice').hidden"), "stopping is no error"


@pytest.mark.parametrize(
    "markup", ["<img src=x onerror=\"document.title='owned'\">", "<script>document.title='owned'</script>"]
)
def test_markup_in_an_answer_stays_text(page, served, script, markup):
    served.engine.script = script(pieces=["see ", markup])
    ask(page, markup)
    answered(page, f"see {markup}")
    assert page.evaluate("document.querySelectorAll('#turns img, #turns script').length") == 0
    assert page.evaluate("document.title") == "optimc"


def test_an_answer_that_fails_says_why(page, served, script):
    served.engine.script = script(pieces=["a", "b"], fail_after=1)
    ask(page, "fail")
    page.wait_for("!document.querySelector('#notice').hidden")
    assert "step 3 failed: injected" in page.text("#notice")
    assert page.text("#turns .assistant.cut") == "a"
    served.engine.script = script(pieces=["fine"])
    ask(page, "again")
    answered(page, "fine")
    assert page.evaluate("document.querySelector('#notice').hidden")


def test_the_dashboard_shows_what_runs(page, served, script):
    assert page.text("#running") == "0"
    served.engine.script = script(pieces=["a"] * 1000, delay_s=0.05)
    with served.http.stream("POST", "/v1/completions", json={"prompt": "x", "n": 2, "stream": True}):
        page.wait_for("document.querySelector('#running').textContent === '2'")
        stats = served.engine.stats()
        assert page.text("#waiting") == str(stats.waiting)
        assert page.text("#kv") == f"{100 * stats.kv_usage:.1f} % of {stats.blocks_total} blocks"
        assert page.text("#hit-rate") == f"{100 * stats.prefix_hit_rate:.1f} %"
        page.wait_for("parseFloat(document.querySelector('#server-rate').textContent) > 10")
        assert "," in page.evaluate("document.querySelector('#rate-line').getAttribute('points')")
    page.wait_for("document.querySelector('#running').textContent === '0'")


def test_a_refusal_is_shown_with_when_to_come_back(browser, served):
    served.engine.capacity = 0
    browser.open(f"{served.url}/")
    ask(browser, "now")
    browser.wait_for("!document.querySelector('#notice').hidden")
    assert browser.text("#notice") == "429: 0 requests are waiting already (try again in 1 s)"


def test_a_model_without_a_chat_template_continues_text(browser, engine, script, start_server):
    engine.script = script(pieces=[" there"])
    with start_server(engine, None, ServerOptions()) as served:
        browser.open(f"{served.url}/")
        browser.wait_for("document.querySelector('#model').textContent.includes('no chat template')")
        ask(browser, "hello")
        answered(browser, " there")
        assert engine.submitted[-1].prompt == engine.tokenizer.encode("hello")
        browser.open("about:blank")


def test_a_guarded_server_answers_who_has_typed_a_key(browser, engine, template, script):
    engine.script = script(pieces=["welcome"])
    keys = KeyRing.from_text("team:0123456789abcdef")
    ready = threading.Event()
    app = build_app(engine, model_name="scripted", chat_template=template, keys=keys)
    server = HttpServer(app, port=0, drain_timeout_s=1, on_ready=lambda _url: ready.set())
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert ready.wait(10)
        browser.open(f"{server.url}/")
        browser.wait_for("document.querySelector('#model').textContent.includes('wants an API key')")
        ask(browser, "let me in")
        browser.wait_for("!document.querySelector('#notice').hidden")
        assert browser.text("#notice").startswith("401: ")
        browser.evaluate("document.querySelector('#key').focus()")
        browser.type("0123456789abcdef")
        browser.wait_for("document.querySelector('#model').textContent.startsWith('scripted')")
        ask(browser, "now")
        answered(browser, "welcome")
        assert len(template.seen[-1]) == 1, "a question that was refused is not part of the conversation"
        assert browser.evaluate("document.cookie + localStorage.length + sessionStorage.length") == "00"
    finally:
        browser.open("about:blank")
        server.stop()
        thread.join(10)


def test_the_files_may_call_nobody_else_and_there_are_no_others(served):
    for path, kind in (("/", "text/html"), ("/page/app.js", "text/javascript"), ("/page/style.css", "text/css")):
        response = served.http.get(path)
        assert response.headers["content-type"].startswith(kind)
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert "unsafe" not in response.headers["content-security-policy"]
        assert "http://" not in response.text.replace("http://www.w3.org/", "")
        assert "https://" not in response.text
    for name in ("__init__.py", "..%2f__init__.py", "nothing"):
        assert served.http.get(f"/page/{name}").status_code == 404


def test_figures_are_of_now(served):
    first, second = (served.http.get("/dashboard.json") for _ in range(2))
    assert first.headers["cache-control"] == "no-store"
    assert second.json()["time_s"] > first.json()["time_s"]
    assert first.json()["has_chat"]
    assert first.json()["model"] == "scripted"
