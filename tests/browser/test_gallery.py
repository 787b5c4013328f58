"""The HTML gallery of a batch in Chromium: it shows every picture, filters by words, and asks for nothing outside."""

from __future__ import annotations

from pathlib import Path

import tiny
from playwright.sync_api import Page

from anima.batch.grid import gallery
from anima.batch.jobs import JobList
from anima.batch.run import run_batch
from anima.batch.worker import Models


def test_the_gallery_filters(page: Page, tmp_path: Path) -> None:
    tiny.write_models(tmp_path)
    models = Models(
        *(str(tmp_path / part / "tiny.safetensors") for part in ("diffusion_models", "text_encoders", "vae"))
    )
    row = {"prompt": '{color} "circle" <b>&', "width": 32, "height": 32, "steps": 1, "cfg": 1.0}
    jobs = JobList([row], {"color": ["Red", "blue"], "seed": range(3)})
    assert run_batch(jobs, models, tmp_path / "out").made == 6
    gallery(tmp_path / "out", tmp_path / "gallery.html", 64)

    browser = page.context.browser
    assert browser is not None
    view = browser.new_page()
    asked: list[str] = []
    view.on("request", lambda request: asked.append(request.url))
    view.goto((tmp_path / "gallery.html").as_uri())
    images = "[...document.querySelectorAll('img')].every(i => i.complete && i.naturalWidth === 32)"
    view.wait_for_function(images)
    assert view.locator("figcaption").first.inner_text().startswith('Red "circle" <b>&')

    def shown(words: str) -> int:
        view.fill("#filter", words)
        count = view.locator("figure:visible").count()
        assert view.inner_text("#count") == f"{count} of 6"
        return count

    assert [shown(words) for words in ("", "red", "RED  seed=1", "red blue", '"circle" <b>', "seed=2")] == [
        6, 3, 1, 0, 6, 2,
    ]  # fmt: skip
    assert all(url.startswith(("file:", "data:")) for url in asked)
    view.close()
