"""The comparator's live page, in a headless Chromium, against running services.

With ISOBIT_SCREENSHOTS set, the pictures of docs/ are written to that folder.
"""

import contextlib
import hashlib
import json
import os
import socket
import tempfile
import threading
import time
import unittest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from browser import Browser, missing_programs

from isobit import ComparatorClient, RolloutClient, ScorerClient
from isobit.errors import FailedPreconditionError
from isobit.launch import Setting, run_model_tool
from isobit_tools.testing import BIN_DIR, ServiceTest, http_url

PAGE = Path(__file__).resolve().parents[2] / "trainer_bridge" / "comparator" / "page"
ARROW_LEFT = "\ue012"
DRAW = {"max_tokens": 64, "temperature": 1.0, "seed": 5, "ignore_eos": True}
PROMPTS = [[1, 2, 3], [4, 5], [6]]


class BrowserTest(ServiceTest):
    setting = Setting("tree", tp_size=2, shards=2)

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if missing := missing_programs():
            raise unittest.SkipTest(f"no {' and '.join(missing)}: deploy/install_deps.sh page installs them")
        profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        cls.addClassCleanup(profile.cleanup)
        cls.browser = cls.enterClassContext(Browser(Path(profile.name)))

    def setUp(self):
        super().setUp()
        self.browser.resize(1600, 1200)

    def tearDown(self):
        # Nothing of the page may keep streams of a service that is about to stop.
        self.browser.open("about:blank")
        super().tearDown()

    def state(self) -> str:
        return self.browser.run("return document.body.dataset.state")

    def wait_for_state(self, state: str, timeout: float = 20.0) -> float:
        return self.browser.wait_for(lambda: self.state() == state, f"the page says {state}", timeout)

    def assert_fits(self, width: int) -> None:
        self.browser.resize(width, 1200)
        inside, wide = self.browser.run("return [innerWidth, document.documentElement.scrollWidth]")
        self.assertEqual(inside, width)
        self.assertLessEqual(wide, inside, f"nothing sticks out at {width} px")


class LivePageTest(BrowserTest):
    @classmethod
    def make_model(cls):
        super().make_model()
        run_model_tool(
            BIN_DIR, "flip-bit", str(cls.model), "model.layers.1.mlp.down_proj.weight", "77", "1",
            str(cls.scratch / "flipped"),
        )  # fmt: skip

    def start_page(self, *flags: str, port: int = 0):
        """Starts the services and opens the page."""
        self.rollout, self.scorer = self.start("rollout"), self.start("scorer")
        self.comparator = self.start_comparator(*flags, port=port)
        self.browser.open(http_url(self.comparator, "http", "/"))

    def start_comparator(self, *flags: str, port: int = 0):
        sides = (f"--rollout={self.rollout.target}", f"--scorer={self.scorer.target}")
        return self.start("comparator", *sides, f"--http_port={port}", *flags)

    def test_from_nothing_to_equal_to_one_flipped_bit(self):
        self.start_page()
        self.wait_for_state("ready")
        self.assertEqual(self.browser.text("#verdict"), "0 of 0 tokens differ")
        with ComparatorClient(self.comparator.target) as client:
            client.compare(PROMPTS, n=4, **DRAW)
            self.wait_for_state("equal", timeout=1.0)
            self.check_figures(client)
            self.assertEqual(self.browser.text("#verdict"), "0 of 768 tokens differ")
            self.assertEqual(self.browser.text("#worst-none"), "No token differs or is impossible.")
            self.live_picture(client)

            # The scorer gets weights with one other bit: the sides cannot be compared, and the page says why.
            self.update_both("flipped", version=3)
            self.wait_for_state("refused", timeout=5.0)
            self.assertIn("weight versions must be equal", self.browser.text("#obstacle"))
            with self.assertRaises(FailedPreconditionError):
                client.compare(PROMPTS, **DRAW)
            self.browser.wait_for(
                lambda: "weight versions" in (self.browser.text("#refusals") or ""), "the refusal is listed"
            )
            # Compared all the same, the bit shows at once, and at the right token.
            found = client.compare(PROMPTS, n=4, allow_weight_mismatch=True, **DRAW)
            taken = self.wait_for_state("unequal", timeout=1.0)
            print(f"the flipped bit showed {taken:.2f} s after the client's last result")
            self.check_figures(client)
            ulp, _, name, gaps, i = max(
                ((gaps.ulp_distances[i], abs(gaps.dlogp[i]), gaps.sequence_id, gaps, i)
                 for gaps in found.gaps for i in range(len(gaps.positions))),
                key=lambda item: item[:2],
            )  # fmt: skip
            bits = [values.view("u4")[i] for values in (gaps.rollout_logprobs, gaps.scorer_logprobs)]
            cells = self.browser.run(
                "return [...document.querySelector('#worst tr').cells].map((cell) => cell.textContent)"
            )
            self.assertEqual(cells[:3], [name, str(gaps.positions[i]), str(gaps.token_ids[i])])
            self.assertTrue(cells[3].endswith(f"0x{bits[0]:08x}"), cells)
            self.assertTrue(cells[4].endswith(f"0x{bits[1]:08x}"), cells)
            self.assertEqual(cells[6], f"{ulp:,}")
        self.picture("page_unequal.png")
        self.browser.resize(375, 812)
        self.picture("page_phone.png")
        for width in (375, 1600):
            self.assert_fits(width)
        self.assertEqual(self.browser.errors(), [])

    def check_figures(self, client: ComparatorClient) -> None:
        """The page's figures are those of the service."""
        total = client.get_server_info().total
        statistics = total.statistics
        self.browser.wait_for(
            lambda: self.browser.text("#sequences-total") == f"{total.num_sequences:,}", "the last sequence"
        )
        self.assertEqual(
            self.browser.text("#verdict"),
            f"{statistics.num_unequal:,} of {statistics.num_tokens:,} tokens differ",
        )
        for name in ("kl_k1", "kl_k2", "kl_k3", "max_abs_dlogp"):
            value = getattr(statistics, name)
            self.assertEqual(
                self.browser.text(f"#{name}"),
                self.browser.run("return arguments[0] === 0 ? '0' : arguments[0].toPrecision(3)", value),
            )
        self.assertEqual(self.browser.text("#max_ulp"), f"{statistics.max_ulp_distance:,}")
        digest = self.browser.text("#rollout dl")
        self.assertIn(client.get_server_info().rollout.server.weight_version.digest, digest)

    def test_restarts_are_survived(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.start_page(port=port)
        self.wait_for_state("ready")
        with ComparatorClient(self.comparator.target) as client:
            client.compare(PROMPTS, **DRAW)
        self.browser.wait_for(
            lambda: self.browser.text("#verdict") == "0 of 192 tokens differ", "the last sequence is shown"
        )
        self.comparator.process.terminate()
        self.comparator.process.wait()
        self.browser.wait_for(
            lambda: "disconnected" in self.browser.text("#connection"), "the page sees the end"
        )
        self.assertEqual(self.browser.text("#verdict"), "0 of 192 tokens differ", "the last known stays")
        self.comparator = self.start_comparator(port=port)
        self.browser.wait_for(lambda: self.browser.text("#connection") == "live", "connected again")
        self.wait_for_state("ready")
        self.assertEqual(self.browser.text("#verdict"), "0 of 0 tokens differ", "a new history")
        # A side that stops is named, and its return noticed.
        self.scorer.process.terminate()
        self.scorer.process.wait()
        self.wait_for_state("waiting")
        self.assertEqual(self.browser.run("return document.querySelector('#scorer').dataset.reachable"), "no")

    def test_tokens_are_asked_for(self):
        access = self.scratch / "access.json"
        digest = hashlib.sha256(b"secret").hexdigest()
        access.write_text(
            json.dumps({"clients": [{"name": "me", "roles": ["watch"], "token_sha256": [digest]}]})
        )
        comparator = self.start("comparator", "--http_port=0", f"--access_file={access}", token="secret")
        self.browser.open(http_url(comparator, "http", "/"))
        self.browser.wait_for(lambda: self.browser.text("#login h2"), "the page asks for a token")
        for token in ("wrong", "secret"):
            self.assertEqual(self.state(), "loading", "nothing is shown before")
            self.browser.wait_for(
                lambda: self.browser.run("return document.activeElement.id") == "token",
                "the field has the focus",
            )
            self.browser.type("#token", f"{token}\n")
            time.sleep(0.3)
        self.wait_for_state("waiting")
        self.assertTrue(self.browser.run("return document.querySelector('#login').hidden"))

    def live_picture(self, client: ComparatorClient) -> None:
        """Some traffic with an update of weights, as the picture at the top of README shows it."""
        if "ISOBIT_SCREENSHOTS" not in os.environ:
            return
        prompts = [[i + 1, 2, 3] for i in range(4)]
        for i in range(90):
            client.compare(prompts, n=4, **{**DRAW, "seed": i, "max_tokens": 16 + 4 * (i % 13)})
            if i == 45:
                self.update_both("model", version=2)
            time.sleep(0.4)
        self.browser.resize(1200, 1500)
        self.picture("page.png")
        self.browser.resize(1600, 1200)

    def update_both(self, scorer_model: str, version: int) -> None:
        with RolloutClient(self.rollout.target) as rollout, ScorerClient(self.scorer.target) as scorer:
            rollout.update_weights("model", weight_version=version)
            scorer.update_weights(scorer_model, weight_version=version)

    def picture(self, name: str) -> None:
        if folder := os.environ.get("ISOBIT_SCREENSHOTS"):
            time.sleep(0.5)
            self.browser.screenshot(Path(folder) / name)


class FakeComparator:
    """Serves the page's files, and events that a test makes."""

    def __init__(self):
        self.event: dict = {}
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                if self.path == "/events":
                    return self.send_events()
                file = PAGE / ("page.html" if self.path == "/" else self.path[1:])
                kind = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}[file.suffix]
                self.send_response(200)
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.end_headers()
                self.wfile.write(file.read_bytes())

            def send_events(self):
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                first = True
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the page has gone
                    while not fake.over.is_set():
                        event = {**fake.event, "first": first, "time": int(time.time() * 1000)}
                        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                        first = False
                        fake.over.wait(0.2)

            def log_message(self, *_):
                pass

        self.over = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/"

    def stop(self):
        self.over.set()
        self.server.shutdown()
        self.server.server_close()


def made_event(num_seconds: int = 0, **changes) -> dict:
    side = {
        "weights": {"id": 1, "digest": "d" * 64}, "fingerprint": "f" * 64, "contract": 2, "model": "M",
        "numerics": "NUMERICS_MODE_TREE", "version": "0", "tp_size": 4, "shards": 2,
    }  # fmt: skip
    summary = {
        "sequences": 2, "unequal_sequences": 0, "tokens": 10, "unequal": 0, "nan": 0, "impossible": 0,
        "kl_k1": 0, "kl_k2": 0, "kl_k3": 0, "max_abs_dlogp": 0, "max_ulp": 0,
    }  # fmt: skip
    now = int(time.time())
    event = {
        "version": "0", "uptime": 1.0, "state": "equal", "obstacle": "", "open": 0, "refused": 0,
        "total": {**summary, "missing": 0}, "window": summary, "sides": {"rollout": side, "scorer": side},
        "has_texts": False, "worst": [], "sequences": [], "refusals": [], "marks": [],
        "seconds": [
            [now - num_seconds + i, 100, i % 7 == 0, 0, 0, 1e-6 * (i % 11), 0] for i in range(num_seconds)
        ],
    }  # fmt: skip
    return {**event, **changes}


class MadeEventsTest(BrowserTest):
    """What services cannot be brought to show at will."""

    def setUp(self):
        super().setUp()
        self.fake = FakeComparator()
        self.addCleanup(self.fake.stop)

    def open(self, **changes) -> None:
        self.fake.event = made_event(**changes)
        self.browser.open(self.fake.url)

    def test_ten_thousand_points_stay_smooth(self):
        self.open(
            num_seconds=10000, marks=[{"id": 2, "digest": "", "side": "rollout", "time": time.time() * 1e3}]
        )
        self.wait_for_state("equal")
        self.browser.click("#ranges button[data-seconds='0']")
        frames = self.browser.run_async("""
            const done = arguments[0], times = [];
            let last = performance.now();
            function frame() {
              draw();  // on top of what the page draws itself
              const now = performance.now();
              times.push(now - last);
              last = now;
              if (times.length < 60) requestAnimationFrame(frame); else done(times.slice(5));
            }
            requestAnimationFrame(frame);
        """)
        self.assertEqual(self.browser.run("return state.seconds.length"), 10000)
        frames.sort()
        print(f"10,000 points: {frames[len(frames) // 2]:.1f} ms a frame, {frames[-1]:.1f} at most")
        # A page that is slow is slow in each frame, a loaded machine in most.
        self.assertLess(frames[len(frames) // 10], 50)
        # Every chart has drawn something.
        self.assertEqual(
            self.browser.run("""
                return [...document.querySelectorAll('figure canvas')].filter((canvas) =>
                  canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)
                    .data.some((byte) => byte !== 0)).length"""),
            4,
        )

    def test_every_state_has_its_words(self):
        for state, words in {
            "waiting": "WAITING FOR THE SIDES", "refused": "CANNOT BE COMPARED", "comparing": "COMPARING",
            "ready": "READY, NOTHING COMPARED YET", "equal": "EQUAL", "unequal": "NOT EQUAL",
            "impossible": "IMPOSSIBLE LOGPROBS",
        }.items():  # fmt: skip
            self.open(state=state)
            self.wait_for_state(state)
            self.assertEqual(self.browser.text("#state"), words)
            for width in (375, 1600):
                self.assert_fits(width)

    def test_numbers_that_json_lacks_and_texts_that_look_like_markup(self):
        summary = made_event()["total"]
        evil = "<img src=x onerror=\"document.body.dataset.evil='yes'\">"
        self.open(
            state="unequal",
            obstacle=evil,
            has_texts=True,
            total={
                **summary, "unequal": 1, "nan": 1, "impossible": 1, "kl_k3": "NaN",
                "max_abs_dlogp": "Infinity", "max_ulp": 2**32 - 1,
            },
            worst=[{
                "sequence": evil, "time": 0, "position": 3, "token": 7, "text": evil,
                "rollout": "NaN", "scorer": -1.5, "dlogp": "NaN", "ulp": 2**32 - 1, "version": 1,
                "rollout_bits": "0x7fc00000", "scorer_bits": "0xbfc00000",
            }],
            sequences=[
                {
                    "id": evil, "tokens": 4, "unequal": 1, "impossible": 1, "max_ulp": 2**32 - 1,
                    "strip": "0009", "first": 3,
                }
            ],
            refusals=[{"time": 0, "why": evil}],
            refused=1,
        )  # fmt: skip
        self.wait_for_state("unequal")
        self.assertEqual(self.browser.text("#verdict"), "1 of 10 tokens differ, 1 impossible")
        self.assertEqual(self.browser.text("#max_abs_dlogp"), "Infinity")
        self.assertEqual(self.browser.text("#max_ulp"), "NaN")
        self.assertEqual(self.browser.text("#worst td"), evil)
        self.assertIsNone(self.browser.run("return document.body.dataset.evil ?? null"))
        self.assertEqual(self.browser.run("return document.querySelectorAll('main img').length"), 0)

    def test_keyboard_and_screen_readers(self):
        self.open(num_seconds=60, state="unequal")
        self.wait_for_state("unequal")
        self.assertEqual(
            self.browser.run("return document.querySelector('#verdict').getAttribute('role')"), "status"
        )
        reached = set()
        for _ in range(20):
            self.browser.press("\ue004")  # Tab
            reached.add(
                self.browser.run(
                    "const e = document.activeElement; return e.id || e.textContent || e.tagName"
                )
            )
        self.assertLessEqual({"theme", "5 minutes", "1 hour", "all", "CANVAS"}, reached)
        self.browser.run("document.querySelector('figure canvas').focus()")
        before = self.browser.run("return document.activeElement.getAttribute('aria-label')")
        for _ in range(40):
            self.browser.press(ARROW_LEFT)
        self.browser.wait_for(
            lambda: self.browser.run("return document.activeElement.getAttribute('aria-label')") != before,
            "the arrows move the reading",
        )
        # Every control and picture has a name.
        self.assertEqual(
            self.browser.run("""
                return [...document.querySelectorAll('button, input, canvas, section')].filter((node) =>
                  !node.textContent.trim() && !node.getAttribute('aria-label') && !node.labels?.length
                  && !node.getAttribute('aria-labelledby')).map((node) => node.outerHTML)"""),
            [],
        )
        theme = self.browser.run("return document.documentElement.dataset.theme")
        self.browser.click("#theme")
        self.assertNotEqual(self.browser.run("return document.documentElement.dataset.theme"), theme)
        for _ in range(2):  # the contrast of the verdict, in both themes
            self.assertGreaterEqual(self.contrast("#verdict", "#verdict-card"), 4.5)
            self.assertGreaterEqual(self.contrast("dt", "section"), 4.5)
            self.browser.click("#theme")

    def contrast(self, text: str, back: str) -> float:
        """The contrast ratio of WCAG 2 between an element's text and another's background."""
        return self.browser.run(
            """
            const light = (selector, property) => {
              const colour = getComputedStyle(document.querySelector(selector))[property];
              const [r, g, b] = colour.match(/[0-9.]+/g).map((part) => part / 255)
                .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
              return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const [a, b] = [light(arguments[0], 'color'), light(arguments[1], 'backgroundColor')];
            return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);""",
            text,
            back,
        )


if __name__ == "__main__":
    unittest.main()
