"""The page to chat at, in a real browser: a reply streams in, can be stopped, and errors are shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.report.browser import Browser, browser
from tests.serving.test_http import bundle, server, until

__all__ = ["bundle"]
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.timeout(120)]
_SEND = """
document.getElementById('temperature').value = 0;
document.getElementById('count').value = arguments[0] || {count};
document.getElementById('prompt').value = 'how do I bake <b>bread</b>?';
document.getElementById('send').click();
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def send(chromium: Browser, count: int) -> None:
    chromium.run(_SEND.replace("{count}", str(count)))


def log(chromium: Browser) -> list[tuple[str, str]]:
    found = chromium.run(
        "return [...document.querySelectorAll('#log > div')].map((e) => [e.className, e.textContent]);"
    )
    return [(kind, text) for kind, text in found]


def element(chromium: Browser, script: str) -> Any:
    """The value of an expression on the page."""
    return chromium.run(f"return {script};")


def text(chromium: Browser, element: str) -> str:
    found: str = chromium.run(f"return document.getElementById('{element}').textContent;")
    return found


def test_a_chat(chromium: Browser, bundle: Path) -> None:
    with server(bundle) as (address, service):
        chromium.open(address, 1280)
        until(lambda: "gpt2 on 2 ranks, 0 running, 0 waiting" in text(chromium, "state"))
        assert text(chromium, "ranks").startswith("0tensor 1 of 2")
        send(chromium, 12)
        until(lambda: "tokens/s" in text(chromium, "speed"))
        (asked, question), (replied, reply) = log(chromium)
        assert (asked, question, replied) == ("user", "how do I bake <b>bread</b>?", "reply")
        assert reply
        assert text(chromium, "speed").startswith("12 tokens, ")
        send(chromium, 200)
        until(lambda: len(log(chromium)) == 4 and log(chromium)[-1][1])
        chromium.run("document.getElementById('stop').click();")
        until(lambda: not service.engine.running)
        send(chromium, 5000)
        until(lambda: log(chromium)[-1][0] == "error")
        assert "expected at most 512 tokens" in log(chromium)[-1][1]
        # The message is in the form again, and not in the chat.
        assert chromium.run("return document.getElementById('prompt').value;") == question
        assert [kind for kind, _ in log(chromium)] == ["user", "reply", "user", "reply", "error"]
        assert chromium.run("return messages.length;") == 4
        chromium.run("document.getElementById('clear').click();")
        assert not log(chromium)
        send(chromium, 12)
        until(lambda: text(chromium, "speed").startswith("12 tokens, "))
        assert log(chromium) == [("user", question), ("reply", reply)]
        # The refusal is in the console too, as any answer that is an error.
        messages = chromium.messages()
        assert all("400 (Bad Request)" in message for message in messages), messages
        for width in (390, 1280):
            chromium.open(address, width, dark=width == 390)
            assert chromium.run("return document.documentElement.scrollWidth <= window.innerWidth;")


MARKDOWN = """# A *title*
Use `x < 1`, **not** <b>this</b>
and 2 * 3 * 4:

```python
def f():
    return "<i>"
```
1. one
2. two
- three"""


def test_replies_are_markdown_and_text_is_no_html(chromium: Browser, bundle: Path) -> None:
    with server(bundle) as (address, _):
        chromium.open(address, 1280)
        shown = chromium.run(
            "const d = document.createElement('div'); d.append(markdown(arguments[0])); return d.innerHTML;", MARKDOWN
        )
        assert shown == (
            "<h3>A <em>title</em></h3><p>Use <code>x &lt; 1</code>, <strong>not</strong> &lt;b&gt;this&lt;/b&gt;<br>"
            'and 2 * 3 * 4:</p><pre><code>def f():\n    return "&lt;i&gt;"</code></pre>'
            '<ol start="1"><li>one</li><li>two</li></ol><ul><li>three</li></ul>'
        )
        chromium.run("line('reply', arguments[0]);", MARKDOWN)
        font = "getComputedStyle(document.querySelector('#log pre code')).fontFamily"
        assert "monospace" in element(chromium, font)


def test_a_chat_survives_a_reload_and_has_a_system_prompt(chromium: Browser, bundle: Path) -> None:
    with server(bundle) as (address, service):
        chromium.open(address, 1280)
        chromium.run("document.getElementById('clear').click();")
        prompts: list[list[int]] = []
        submit = service.engine.submit

        def noted(prompt: Any, *arguments: Any, **options: Any) -> Any:
            prompts.append(prompt)
            return submit(prompt, *arguments, **options)

        service.engine.submit = noted  # type: ignore[method-assign]
        for system in ("", "be brief"):
            chromium.run("document.getElementById('system').value = arguments[0];", system)
            send(chromium, 5)
            until(lambda: "5 tokens, " in text(chromium, "speed") and not element(chromium, "Boolean(controller)"))
        assert "be brief" in service.engine.tokenizer.decode(prompts[1])
        assert "be brief" not in service.engine.tokenizer.decode(prompts[0])
        before = log(chromium)
        # Five tokens are too few for the reply.
        assert [part[1].endswith("[cut after 5 tokens]") for part in before] == [False, True] * 2
        chromium.open(address, 1280)
        assert [part[0] for part in log(chromium)] == ["user", "reply"] * 2
        assert [part[1].removesuffix("[cut after 5 tokens]") for part in before] == [part[1] for part in log(chromium)]
        assert element(chromium, "document.getElementById('system').value") == "be brief"
        assert element(chromium, "messages.length") == 4
        chromium.run("document.getElementById('clear').click();")
        chromium.open(address, 1280)
        assert not log(chromium)
        chromium.messages()


def test_the_log_follows_unless_somebody_reads_back(chromium: Browser, bundle: Path) -> None:
    with server(bundle) as (address, _):
        chromium.open(address, 1280)
        chromium.run("for (let i = 0; i < 99; i++) line('user', 'text ' + i);")
        at_end = "$('log').scrollHeight - $('log').scrollTop - $('log').clientHeight < 2"
        assert element(chromium, at_end)
        chromium.run("$('log').scrollTop = 100; line('reply', 'more');")
        assert element(chromium, "$('log').scrollTop") == 100
        chromium.run("$('log').scrollTop = $('log').scrollHeight; line('reply', 'more');")
        assert element(chromium, at_end)


def test_a_key_is_asked_for(chromium: Browser, bundle: Path) -> None:
    with server(bundle, api_keys=("secret",)) as (address, _):
        chromium.open(address, 1280)
        until(lambda: "gpt2 on 2 ranks" in text(chromium, "state"))
        send(chromium, 3)
        until(lambda: ("error", "a valid API key is required") in log(chromium))
        chromium.run("document.getElementById('key').value = 'secret';")
        send(chromium, 3)
        until(lambda: "tokens/s" in text(chromium, "speed"))
        chromium.messages()
