"""Opens the built pages in headless Chromium. Fails if a page overflows, is hard to read, or the search misses it.

    make docs-check       # after `make docs`
    make docs-pictures    # also writes pictures of all pages into site/pictures

Needs Chromium: ``apt-get install chromium`` on Debian and Ubuntu.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from playwright.sync_api import Page, sync_playwright
from tqdm import tqdm

WIDTHS, WIDE = (1440, 1280, 390), 1280  # CSS pixels
SCHEMES = ("light", "dark")
SEARCHES = {  # for each query, the pages of which one must be among the first three results
    "her_ratio": ("choose/", "reference/api/transforms/"),
    "capacity": ("choose/", "reference/api/transforms/"),
    "n_step": ("how-to/n-step/",),
    "SB3": ("how-to/from-stable-baselines3/",),
}
# Overflow; identifiers that break within a word; headings with a contrast below 4.5, as in WCAG 2.
FAULTS = """wide => {
    const found = [], root = document.documentElement
    if (root.scrollWidth > root.clientWidth) found.push(`is ${root.scrollWidth} pixels wide`)
    for (const code of wide ? document.querySelectorAll("article :is(p, li, td) code") : [])
        if (!/[\\s/[("-]/.test(code.textContent) && new Set([...code.getClientRects()].map(box => box.top)).size > 1)
            found.push(`breaks ${code.textContent}`)
    const light = colour => {
        const [red, green, blue] = colour.match(/[\\d.]+/g).map(Number).map(value => value / 255)
            .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue
    }
    const behind = light(getComputedStyle(document.body).backgroundColor) + 0.05
    for (const heading of document.querySelectorAll("article :is(h1, h2, h3)")) {
        const shade = light(getComputedStyle(heading).color) + 0.05
        if (Math.max(shade, behind) / Math.min(shade, behind) < 4.5) found.push(`pale heading ${heading.textContent}`)
    }
    return found
}"""


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files and logs nothing."""

    def log_message(self, *args: object) -> None:  # noqa: D102
        pass


def serve(site: Path) -> str:
    """Serve a folder on a free port of this machine, and return its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(site)))
    Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}/"


def search(page: Page, address: str, query: str, wanted: tuple[str, ...]) -> list[str]:
    """Return the addresses of the first three results of a search, relative to the site, once one of them is wanted.

    Each key starts a search, so the results of the whole query come last. The page can miss keys while it loads, so the
    query is typed up to three times.
    """
    found: list[str] = []
    for attempt in range(60):
        if attempt % 20 == 0:
            page.goto(address, wait_until="networkidle")
            page.locator("input[name=query]").press_sequentially(query)
        page.wait_for_timeout(500)  # milliseconds
        links = page.eval_on_selector_all("a.md-search-result__link", "links => links.map(link => link.href)")
        pages = [link.removeprefix(address).split("?")[0].split("#")[0] for link in links]
        found = list(dict.fromkeys(pages))[:3]
        if set(found) & set(wanted):
            break
    return found


def main() -> None:
    """Check all pages, and exit with the faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="folder of the built site")
    parser.add_argument("--pictures", type=Path, help="folder for a picture of each page, width and scheme")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("Chromium is missing. On Debian and Ubuntu: apt-get install chromium")
    address, faults = serve(arguments.site), []
    pages = sorted(str(path.parent.relative_to(arguments.site)) for path in arguments.site.rglob("index.html"))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for width, scheme in itertools.product(WIDTHS, SCHEMES):
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            for name in tqdm(pages, desc=f"{width} pixels, {scheme}"):
                page.goto(f"{address}{name}/")
                faults += [f"{name}, {width} pixels, {scheme}: {each}" for each in page.evaluate(FAULTS, width >= WIDE)]
                if arguments.pictures:
                    arguments.pictures.mkdir(parents=True, exist_ok=True)
                    file = "home" if name == "." else name.replace("/", "_")
                    picture = arguments.pictures / f"{file}-{width}-{scheme}.png"
                    page.screenshot(path=picture, full_page=True)
            page.close()
        page = browser.new_page()
        for query, wanted in SEARCHES.items():
            found = search(page, address, query, wanted)
            if not set(found) & set(wanted):
                faults.append(f"search for {query!r}: {', '.join(found)}, and not {' or '.join(wanted)}")
        browser.close()
    if faults:
        sys.exit("\n".join([*faults, f"{len(faults)} faults"]))
    print(f"{len(pages)} pages: no faults")


if __name__ == "__main__":
    main()
