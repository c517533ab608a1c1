"""The page in a real browser, with a server that answers what it is told to."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from browsing import NEEDS_CHROMIUM, check_theme, chromium, eventually
from stubs import SERVING, Stub, answer

from dent.serving.app import make_page
from dent.serving.inputs import read_images
from dent.serving.settings import Serving

Image = pytest.importorskip("PIL.Image", reason="needs Pillow")
pytestmark = [
    pytest.mark.browser,
    NEEDS_CHROMIUM,
]
SCRIPT = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


Open = Callable[..., Any]


@pytest.fixture
def opened(browser: Any, stub: Stub) -> Iterator[Open]:
    """Opens the page and, at the end, refuses errors, dialogs and requests but for `predict`."""
    pages: list[Any] = []
    wrong: list[str] = []
    asked: list[str] = []

    def said(message: Any) -> None:
        if "Failed to load resource" not in message.text:  # a status of 4xx, which tests ask for
            wrong.append(f"{message.type}: {message.text}")

    def opening(**options: Any) -> Any:
        page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
        pages.append(page)
        page.set_default_timeout(20_000)
        page.on("console", said)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: dialog.dismiss())
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("request", lambda one: asked.append(f"{one.method} {one.url}"))
        page.goto(stub.url)
        return page

    yield opening
    for page in pages:
        page.close()
    assert wrong == []
    assert set(asked) <= {f"GET {stub.url}", f"POST {stub.url}predict"}


def answered(page: Any) -> str:
    page.locator("#answer[aria-busy=false]").wait_for()
    text: str = page.locator("#answer .lead").inner_text()
    return text


def png(height: int, width: int, color: tuple[int, int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return file.getvalue()


def test_an_example_shows_what_both_models_answer(opened: Open, stub: Stub) -> None:
    stub.reply = lambda _: (200, {}, answer(static=4, defended=7))
    page = opened()
    assert page.locator("#served").inner_text().split() == [
        "model",
        SERVING.model,
        "defense",
        SERVING.defense,
    ]
    assert not page.locator("#answer").is_visible()
    page.locator("#thumbs button").nth(1).click()
    assert answered(page) == "The static model says deer, the defended model says horse."
    for side, name, verdict in (("static", "deer", "wrong"), ("defended", "horse", "right")):
        panel = page.locator(f".side.{side}")
        says = panel.locator(".says").inner_text()
        assert f"{name} 60 %" in says
        assert verdict in says
        rows = panel.locator(".classes").first
        assert rows.locator(".name").all_text_contents() == list(SERVING.classes)
        assert rows.locator(".first .name").inner_text() == name
        widths = rows.locator("li").evaluate_all(
            """all => all.map((one) => one.querySelector('.fill').getBoundingClientRect().width
                / one.querySelector('.track').getBoundingClientRect().width)"""
        )
        given = answer(static=4, defended=7)
        said = given if side == "defended" else given.static
        assert np.allclose(widths, said.probabilities, atol=0.01)
    entropies = page.locator(".entropy li").all_inner_texts()
    assert [text.split()[-1] for text in entropies] == ["1.250", "1.500", "0.125"]
    facts = page.locator("#answer .facts").inner_text().split("\n")
    assert facts[:4] == ["updates", "6", "computed", "42 ms"]
    assert page.locator("#note").is_visible()
    assert page.locator("#thumbs button[aria-pressed=true]").count() == 1


def test_what_is_sent_is_the_image_to_the_byte(opened: Open, stub: Stub) -> None:
    page = opened()
    page.locator("#thumbs button").nth(1).click()
    answered(page)
    headers, body = stub.asked[-1]
    assert headers["Content-Type"] == "image/png"
    assert "Authorization" not in headers
    sent = read_images(body, headers["Content-Type"], SERVING)
    for canvas in (page.locator("#thumbs canvas").nth(1), page.locator(".shown canvas")):
        script = "one => [...one.getContext('2d').getImageData(0, 0, 32, 32).data]"
        shown = torch.tensor(canvas.evaluate(script)).view(32, 32, 4)[:, :, :3].permute(2, 0, 1)
        assert torch.equal(shown[None] / 255, sent)


def test_a_file_is_made_as_small_as_the_model_takes_it(opened: Open, stub: Stub) -> None:
    page = opened()
    page.locator("#thumbs button").nth(5).wait_for()
    wide = Image.new("RGB", (500, 100), (0, 0, 255))
    wide.paste((255, 0, 0), (200, 0, 300, 100))  # the middle, which is what is left of it
    file = io.BytesIO()
    wide.save(file, "PNG")
    chosen = [
        {"name": "wide.png", "mimeType": "image/png", "buffer": file.getvalue()},
        {"name": "green.png", "mimeType": "image/png", "buffer": png(32, 32, (0, 255, 0))},
    ]
    page.locator("#file").set_input_files(chosen)
    assert answered(page) == "The static model says cat, the defended model says dog."
    assert page.locator("#thumbs button").count() == 8
    assert page.locator("#thumbs button[aria-pressed=true]").inner_text() == "wide.png"
    assert page.locator(".verdict").count() == 0  # nobody knows what it is
    sent = read_images(stub.asked[-1][1], "image/png", SERVING)
    red = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1)
    assert (sent - red).abs().max() < 0.05  # a little of the rest is mixed in at the edges
    page.locator("#thumbs button").nth(7).click()
    eventually(page, "document.querySelector('.shown canvas').ariaLabel.startsWith('green')")
    assert stub.asked[-1][1] == chosen[1]["buffer"]


@pytest.mark.parametrize("how", ["drop", "paste"])
def test_images_are_dropped_and_pasted(opened: Open, stub: Stub, how: str) -> None:
    page = opened()
    script = """([how, bytes]) => {
        const transfer = new DataTransfer();
        transfer.items.add(new File([new Uint8Array(bytes)], "x.png", { type: "image/png" }));
        const event = how === "drop"
            ? new DragEvent("drop", { dataTransfer: transfer, cancelable: true })
            : new ClipboardEvent("paste", { clipboardData: transfer });
        window.dispatchEvent(event);
        return how === "paste" || event.defaultPrevented;
    }"""
    body = png(32, 32, (9, 8, 7))
    assert page.evaluate(script, [how, list(body)])
    answered(page)
    assert stub.asked[-1][1] == body


def test_what_is_no_image_is_not_sent(opened: Open, stub: Stub) -> None:
    page = opened()
    page.locator("#file").set_input_files(
        {"name": "a.txt", "mimeType": "text/plain", "buffer": b"hello"}
    )
    page.locator("#problem", has_text="a.txt is not an image that this browser can read").wait_for()
    assert stub.asked == []


@pytest.mark.parametrize(
    ("status", "headers", "content", "text"),
    [
        (422, {}, {"detail": "expected 32 x 32"}, "No answer (422): expected 32 x 32."),
        (
            429,
            {"Retry-After": "7"},
            {"detail": "too many wait"},
            "(429): too many wait; try again in 7 s.",
        ),
        (500, {}, {"detail": [{"msg": "x"}]}, "(500): the server does not say why."),
        (502, {}, "<html>", "The server answered 502, which this page cannot read."),
        (422, {}, {"detail": SCRIPT}, SCRIPT),
    ],
)
def test_a_refusal_is_shown_with_its_reason(
    opened: Open, stub: Stub, status: int, headers: dict[str, str], content: Any, text: str
) -> None:
    page = opened()
    page.locator("#thumbs button").first.click()
    answered(page)
    stub.reply = lambda _: (status, headers, content)
    page.locator("#thumbs button").nth(2).click()
    page.locator("#problem").wait_for()
    assert text in page.locator("#problem").inner_text()
    assert not page.locator("#answer").is_visible()
    assert not page.locator("#token").is_visible()
    stub.reply = lambda _: (200, {}, answer())
    page.locator("#thumbs button").nth(2).click()
    answered(page)
    assert not page.locator("#problem").is_visible()


def test_a_server_that_is_gone(opened: Open) -> None:
    page = opened()
    page.locator("#thumbs button").nth(5).wait_for()
    page.route("**/predict", lambda route: route.abort())
    page.locator("#thumbs button").first.click()
    page.locator("#problem", has_text="The server does not answer.").wait_for()


def test_a_token_is_asked_for_and_sent(opened: Open, stub: Stub) -> None:
    def reply(_: int) -> tuple[int, dict[str, str], Any]:
        if stub.asked[-1][0].get("Authorization") == "Bearer secret":
            return 200, {}, answer()
        return 401, {}, {"detail": "the token is wrong"}

    stub.reply = reply
    page = opened()
    page.locator("#thumbs button").first.click()
    page.locator("#token").wait_for()
    page.locator("#key").fill("guess")
    page.locator("#key").press("Enter")
    page.locator("#problem", has_text="the token is wrong").wait_for()
    page.locator("#key").fill("secret")
    page.locator("#token button").click()
    answered(page)
    assert not page.locator("#problem").is_visible()
    assert page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0


def test_the_last_image_chosen_is_the_one_that_is_shown(opened: Open, stub: Stub) -> None:
    held = threading.Event()

    def reply(number: int) -> tuple[int, dict[str, str], Any]:
        if number == 1:
            held.wait(10)
            return 200, {}, answer(static=0, defended=0)
        return 200, {}, answer(static=8, defended=8)

    stub.reply = reply
    page = opened()
    page.locator("#thumbs button").nth(5).wait_for()
    page.locator("#thumbs button").nth(0).click()
    page.wait_for_timeout(100)
    page.locator("#thumbs button").nth(2).click()
    assert answered(page) == "Both models say ship."
    held.set()
    page.wait_for_timeout(200)
    assert answered(page) == "Both models say ship."


def test_names_are_shown_as_text_and_only_some_of_many_classes(opened: Open, stub: Stub) -> None:
    names = tuple(f"{SCRIPT} {number}" for number in range(100))
    stub.page = make_page(Serving(model=SCRIPT, classes=names))
    stub.reply = lambda _: (200, {}, answer(static=98, defended=7, names=names))
    page = opened()
    assert SCRIPT in page.locator("#served").inner_text()
    assert page.locator("#thumbs button").count() == 0  # there is no horse among these classes
    page.locator("#file").set_input_files(
        {"name": f"{SCRIPT}.png", "mimeType": "image/png", "buffer": png(32, 32, (1, 2, 3))}
    )
    assert f"{SCRIPT} 98" in answered(page)
    rows = page.locator(".side.static .classes").first
    assert rows.locator("li").count() == 10
    assert rows.locator(".first .name").inner_text() == f"{SCRIPT} 98"
    assert SCRIPT in page.locator("#thumbs").inner_text()


def test_another_size_is_sent_in_that_size(opened: Open, stub: Stub) -> None:
    serving = Serving(size=(48, 20))
    stub.page = make_page(serving)
    page = opened()
    page.locator("#thumbs button").first.click()
    answered(page)
    assert read_images(stub.asked[-1][1], "image/png", serving).shape == (1, 3, 48, 20)


def test_dark_and_light_follow_the_system_and_the_button(opened: Open) -> None:
    check_theme(opened)


@pytest.mark.parametrize("width", [320, 360, 768, 1280])
def test_no_page_is_wider_than_its_screen(opened: Open, stub: Stub, width: int) -> None:
    names = ("a name that is far longer than its place", *SERVING.classes[1:])
    stub.reply = lambda _: (200, {}, answer(0, 1, names=names))
    page = opened(viewport={"width": width, "height": 740})
    page.locator("#thumbs button").first.click()
    answered(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = page.locator("main *").evaluate_all(
        "(all, width) => all.filter((one) => one.getBoundingClientRect().right > width + 1).length",
        width,
    )
    assert outside == 0
    tops = page.locator(".side .classes").evaluate_all("all => all.map((one) => one.offsetTop)")
    assert tops[0] == tops[2]  # the sides are level
    assert tops[1] == tops[3]
