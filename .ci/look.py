"""Looks at each page of the built site in Chromium, as a reader has it: ``python .ci/look.py docs-output/site``.

No code is cut, every link leads to what is there, pictures load, text can be read in light and dark (4.5 to 1), code
has a copy button, and no page asks another host for anything. ``CHROMIUM`` names the program.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
WIDTH = 1280
LOOK = """
(async () => {
  const said = [];
  const dark = %s;
  document.querySelectorAll('.md-content img').forEach(image => {
    if (!image.complete || !image.naturalWidth) said.push('no picture: ' + image.src);
  });
  document.querySelectorAll('.md-content pre > code').forEach(code => {
    if (code.scrollWidth > code.clientWidth + 1) said.push('cut: ' + code.innerText.split('\\n')[0]);
    if (!code.closest('.highlight').querySelector('button'))
      said.push('no copy button: ' + code.innerText.split('\\n')[0]);
  });
  const scheme = document.body.getAttribute('data-md-color-scheme');
  if (scheme !== (dark ? 'slate' : 'default')) said.push('scheme is ' + scheme);
  if (!document.querySelector('.md-header__source a')) said.push('no link to the repository');
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
  const rgba = color => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const over = (top, below) => top.slice(0, 3).map((v, i) => v * top[3] / 255 + below[i] * (1 - top[3] / 255));
  const ground = element => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const layer = rgba(getComputedStyle(at).backgroundColor);
      layers.push(layer);
      if (layer[3] === 255) break;
    }
    return layers.reverse().reduce((below, top) => over(top, below), dark ? [0, 0, 0] : [255, 255, 255]);
  };
  const light = rgb => {
    const [r, g, b] = rgb.map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const low = {};
  const walker = document.createTreeWalker(document.querySelector('.md-content'), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, owner = node.parentElement;
    if (!node.data.trim() || !owner.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    if (owner.closest('.headerlink, script, style, button')) continue;
    const style = getComputedStyle(owner), below = ground(owner), above = over(rgba(style.color), below);
    const [a, b] = [light(above), light(below)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05), size = parseFloat(style.fontSize);
    if (ratio < (size >= 24 || (size >= 18.6 && style.fontWeight >= 700) ? 3 : 4.5))
      low[ratio.toFixed(2) + ' ' + (owner.className || owner.tagName)] ??= node.data.trim().slice(0, 30);
  }
  Object.entries(low).forEach(([what, text]) => said.push('contrast ' + what + ': ' + text));
  const links = [...document.querySelectorAll('a[href]')].map(a => a.href);
  const named = [...document.querySelectorAll('[id], a[name]')];
  const names = named.flatMap(e => [e.id, e.getAttribute('name')]).filter(Boolean);
  return {said, links, names, code: document.querySelectorAll('.md-content pre > code').length};
})()
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its base's)
        pass


class Chromium:
    """One page of a headless Chromium, over its pipe: each message is JSON with a zero behind it."""

    def __init__(self, program: str, home: str) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        wired = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",  # /dev/shm of a container is small
            "--remote-debugging-pipe",
            f"--user-data-dir={home}",
        ]
        self.process = subprocess.Popen(  # noqa: S603
            ["/bin/bash", "-c", wired, program, *flags],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._unread, self._number, self._session = b"", 0, ""
        self.requests, self._loaded = list[str](), False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=900, deviceScaleFactor=1, mobile=False)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            read = os.read(self._answers, 1 << 20)
            if not read:
                raise RuntimeError("Chromium has ended")
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\0")
        event: dict[str, Any] = json.loads(line)
        if event.get("method") == "Page.loadEventFired":
            self._loaded = True
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])
        return event

    def open(self, url: str) -> None:
        self._loaded = False
        self.call("Page.navigate", url=url)
        while not self._loaded:
            self._next()

    def run(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"]["value"]

    def scheme(self, dark: bool) -> None:
        value = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])


@contextmanager
def served(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


@contextmanager
def browser() -> Iterator[Chromium]:
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        raise SystemExit(f"no browser: wanted {' or '.join(PROGRAMS)} (apt-get install chromium), or CHROMIUM=PATH")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        chromium = Chromium(program, home)
        try:
            yield chromium
        finally:
            with suppress(OSError, RuntimeError):
                chromium.call("Browser.close")
            chromium.process.wait()


def dead(links: dict[str, set[str]], names: dict[str, set[str]], site: Path, home: str) -> list[str]:
    """Links to this site that lead nowhere: to no file, or to no such place of a page."""
    wrong = []
    for page, there in sorted(links.items()):
        for link in sorted(there):
            parts = urlsplit(link)
            if f"{parts.scheme}://{parts.netloc}" != home:
                continue
            path = unquote(parts.path)
            file = site / path.lstrip("/") / ("index.html" if path.endswith("/") else "")
            if not file.is_file():
                wrong.append(f"{page}: dead link: {path}")
            elif parts.fragment and path in names and unquote(parts.fragment) not in names[path]:
                wrong.append(f"{page}: no such place: {path}#{parts.fragment}")
    return wrong


def main(site: Path) -> int:
    pages = sorted(
        f"/{file.parent.relative_to(site).as_posix()}/".replace("/./", "/") for file in site.rglob("index.html")
    )
    wrong, links, names, code = list[str](), dict[str, set[str]](), dict[str, set[str]](), 0
    with served(site) as home, browser() as chromium:
        for dark in (False, True):
            chromium.scheme(dark)
            for page in pages:
                chromium.open(home + page)
                seen = chromium.run(LOOK % ("true" if dark else "false"))
                wrong += [f"{page}: {'dark: ' if dark else ''}{what}" for what in seen["said"]]
                links[page], names[page] = set(seen["links"]), set(seen["names"])
                code += seen["code"]
        wrong += sorted({f"asked elsewhere: {url}" for url in chromium.requests if not url.startswith((home, "data:"))})
        wrong += dead(links, names, site, home)
    for line in wrong:
        print(line)
    counted = (
        f"{len(pages)} pages in light and dark, {code // 2} pieces of code, {len(set().union(*links.values()))} links"
    )
    print(f"{counted}: {f'{len(wrong)} wrong' if wrong else 'all as they should be'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
