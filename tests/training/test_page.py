"""The report page works in a browser: it is drawn without a complaint, on a desk and on a phone.

Its figures can be read by mouse, touch and keyboard.
"""

import base64
import itertools
import json
import os
import re
import select
import shutil
import subprocess
import sys
import time

import pytest
import torch
from chain_folders import CAPTIONED, restored, write_chain, write_chain_comparison
from held_out_folders import LONG_LABEL, classes, numbers, write_answers
from test_report import PAYLOADS, write_compare, write_run, write_tasks

import coadjoint as co
from coadjoint.diagnostics import examination
from coadjoint.training.report import diagnoses
from coadjoint.training.report import pages as pages_module

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
]  # fmt: skip
# The browser reads file descriptor 3 and writes 4.
HAND_OVER = """
import fcntl, os, sys
pair = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
os.dup2(pair[0], 3), os.dup2(pair[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not CHROMIUM, reason="no browser: install chromium, or name one in $CHROMIUM"
    ),
]


class Browser:
    """Chromium, spoken to over a pair of pipes: JSON messages that end in a zero byte."""

    def __init__(self, profile):
        down, up = os.pipe(), os.pipe()
        hand_over = [sys.executable, "-c", HAND_OVER, str(down[0]), str(up[1])]
        command = [*hand_over, CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, pass_fds=(down[0], up[1]), **quiet)
        os.close(down[0]), os.close(up[1])
        self.out, self.into, self.ids, self.buffer, self.events = (
            down[1],
            up[0],
            itertools.count(1),
            b"",
            [],
        )
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    session = None

    def message(self, patience=300.0):
        until = time.monotonic() + patience
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.into], [], [], max(0, until - time.monotonic()))
            piece = os.read(self.into, 1 << 16) if ready else b""
            if not piece:
                raise TimeoutError("the browser did not answer")
            self.buffer += piece
        one, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(one)

    def send(self, method, **params):
        """Ask, and wait for the answer; what happens in between is kept in `events`."""
        call = {"id": next(self.ids), "method": method, "params": params}
        os.write(
            self.out,
            json.dumps(call | ({"sessionId": self.session} if self.session else {})).encode()
            + b"\0",
        )
        while (answer := self.message()).get("id") != call["id"]:
            self.events.append(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def open(self, path, width=1280, height=900, dark=False, script=True):
        """Load a page and wait until it has been drawn."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.send("Emulation.setTouchEmulationEnabled", enabled=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media="screen", features=[scheme])
        self.send("Emulation.setScriptExecutionDisabled", value=not script)
        self.events.clear()
        self.send("Page.navigate", url=path.resolve().as_uri())
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self.message())
        if script:
            self.ask(
                "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
            )

    def ask(self, expression):
        """The value of an expression in the page."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def complaints(self):
        """Console errors and warnings, exceptions, refusals by the security policy, requests beyond
        the page itself.
        """
        said = [
            e
            for e in self.events
            if e["method"]
            in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        ]
        urls = [
            e["params"]["request"]["url"]
            for e in self.events
            if e["method"] == "Network.requestWillBeSent"
        ]
        return said + [u for u in urls if not u.startswith(("file:", "data:"))]

    def mouse(self, kind, x, y, **rest):
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **rest)

    def key(self, name):
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=name,
                code=name,
                windowsVirtualKeyCode={"Tab": 9}.get(name, 0),
            )

    def picture(self, path, full=True):
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        try:
            self.session = None
            self.send("Browser.close")
            self.process.wait(60)
        except (TimeoutError, OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self.out), os.close(self.into)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    one = Browser(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


def evaluation():
    """Of a network that every diagnostic has something to say of."""
    torch.manual_seed(0)
    net = co.Network("elman", inputs=2, hidden=6, outputs=2, activation="relu")
    return co.BPTT()(net, co.Batch(torch.randn(40, 5, 2), torch.randn(5, 2)), "squared")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages of folders: a run of 5,000 steps with 50 probes, a comparison, one of several tasks,
    a deep chain, an autoencoder, a comparison of chains, three steps, no probes, costates alone,
    nothing but a cut line; held-out classes, numbers and series.
    """
    root = tmp_path_factory.mktemp("pages")
    write_run(root / "run")
    write_compare(root / "compare")
    write_tasks(root / "tasks")
    write_chain(root / "chain", pictures=CAPTIONED)
    write_chain(root / "autoencoder", layers=4, pictures=restored(), config="autoencoder: [32, 8]")
    write_chain_comparison(root / "chains")
    write_run(root / "short", steps=3, solved=2, every=1, length=5, status="failed")
    write_run(root / "two probes", steps=50, solved=40, every=20, length=5)
    write_run(
        root / "plain", steps=900, solved=10**9, probes=False, penalised=False, status="interrupted"
    )
    diagnoses.save(
        root / "diagnosis",
        examination.examine(evaluation()),
        {"task": {"name": "lines"}, "seed": 0},
    )
    labels = [LONG_LABEL.format(k) for k in range(40)]
    write_answers(root / "classes", classes(40, labels=labels))
    write_answers(root / "steps", classes(10, at="every"))
    write_answers(root / "numbers", numbers(("the load of a very long line, in kilowatts", "heat")))
    write_answers(root / "forecast", numbers(kind="next"))
    (root / "faint").mkdir()  # costates that hardly differ: long numbers below the colour bar
    probe = {"kind": "probe", "step": 1, "t": list(range(41))}
    probe["log10_costates"] = [-0.00312 + 1e-4 * t for t in range(41)]
    (root / "faint/metrics.jsonl").write_text(json.dumps(probe))
    (root / "cut").mkdir()
    (root / "cut/metrics.jsonl").write_text('{"kind":"train","step":1,"loss":1.5}\n{"kind":"tra')
    for k, payload in enumerate(PAYLOADS):
        names = {
            "name": payload,
            "settings": {payload: payload},
            "runs": [
                {"seed": payload, "steps": 5, "metric": 1, "error": payload, "folder": payload}
            ],
        }
        (root / f"hostile-{k}").mkdir()
        (root / f"hostile-{k}/compare.json").write_text(
            json.dumps(
                {"task": payload, "goal": payload, "command": payload, "rows": [names, names]}
            )
        )
    return {folder.name: pages_module.write(folder) for folder in root.iterdir()}


SCREENS = {
    "desk": {},
    "desk, dark": {"dark": True},
    "phone, dark": {"width": 390, "height": 844, "dark": True},
    "small phone": {"width": 320, "height": 640},
}
FIGURES = {
    "run": 11,
    "compare": 4,
    "tasks": 10,
    "diagnosis": 13,
    "chain": 11,
    "autoencoder": 10,
    "chains": 4,
    "short": 11,
    "two probes": 11,
    "plain": 4,
    "faint": 1,
    "cut": 1,
    "classes": 11,
    "steps": 12,
    "numbers": 17,
    "forecast": 15,
    **{f"hostile-{k}": 3 for k in range(len(PAYLOADS))},
}


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.sampled(4)
def test_every_figure_is_drawn_without_a_complaint(browser, pages, name, screen):
    browser.open(pages[name], **SCREENS[screen])
    assert browser.complaints() == []
    drawn = browser.ask(
        "[...document.querySelectorAll('figure[data-figure]')].map(f => [f.dataset.kind, "
        "f.dataset.drawn, f.querySelectorAll('.plot > svg path, .plot > svg image, .bar').length])"
    )
    assert len(drawn) == FIGURES[name] == int(browser.ask("document.documentElement.dataset.drawn"))
    assert all(kind == done and marks for kind, done, marks in drawn), drawn
    assert (
        browser.ask("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        <= 0
    )
    assert (
        browser.ask(
            "[...document.querySelectorAll('.plot text')].filter(t => { const a = "
            "t.getBoundingClientRect(), b = t.ownerSVGElement.getBoundingClientRect(); return "
            "a.left < b.left - 2 || a.right > b.right + 6; }).map(t => t.textContent)"
        )
        == []
    )
    ground = browser.ask("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, ground[4:-1].split(","))) < 60) == SCREENS[screen].get("dark", False)


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", ["run", "chain", "tasks", "faint", "diagnosis"])
@pytest.mark.sampled(3)
def test_labels_of_rules_and_colour_bars_do_not_touch_others(browser, pages, name, screen):
    """The label of a goal, and the numbers below a colour bar, against those in the same line."""
    browser.open(pages[name], **SCREENS[screen])
    assert (
        browser.ask(
            "[...document.querySelectorAll('.plot > svg')].flatMap(s => { const boxes = "
            "[...s.querySelectorAll('text.rule, text[y=\"42\"]')].map(t => [t.textContent, "
            "t.getBoundingClientRect()]); return boxes.flatMap(([a, p], i) => boxes.slice(i + "
            "1).filter(([, q]) => p.top === q.top && p.left < q.right + 4 && q.left < p.right + "
            "4).map(([b]) => [a, b])); })"
        )
        == []
    )


@pytest.mark.parametrize("screen", ["desk", "small phone"])
@pytest.mark.parametrize("name", ["compare", "tasks", "run"])
def test_no_curve_crosses_the_label_of_a_rule(browser, pages, name, screen):
    """A label stands where no curve is, or on a ground that covers them."""
    browser.open(pages[name], **SCREENS[screen])
    found = browser.ask(
        "[...document.querySelectorAll('figure[data-kind=lines] .plot > svg')].flatMap(s => "
        "[...s.querySelectorAll('line.ruled ~ text.rule')].map(t => { const b = t.getBBox(); "
        "const crossed = [...s.querySelectorAll('path.trace')].some(p => { const n = "
        "p.getTotalLength(); for (let d = 0; d < n; d += 2) { const q = p.getPointAtLength(d); "
        "if (q.x > b.x && q.x < b.x + b.width && q.y > b.y + 2 && q.y < b.y + b.height - 2) "
        "return true; } return false; }); const g = t.previousElementSibling; const on = "
        "g.classList.contains('ground') && +g.getAttribute('x') <= b.x && "
        "+g.getAttribute('x') + +g.getAttribute('width') >= b.x + b.width; "
        "return [t.textContent, !crossed || on]; }))"
    )
    assert found or name == "tasks"
    assert [text for text, is_clear in found if not is_clear] == []


def test_stairs_that_coincide_show_beside_each_other(browser, pages):
    browser.open(pages["compare"])
    widths = browser.ask(
        "[...document.querySelectorAll('#figure-share .plot path.trace')].map(p => "
        "parseFloat(getComputedStyle(p).strokeWidth))"
    )
    assert len(widths) > 1
    assert all(below >= above + 1 for below, above in itertools.pairwise(widths))
    assert widths[-1] == pytest.approx(1.9)


def place(browser, figure, across=0.5, down=0.5):
    """A point of a figure's plot, scrolled into view."""
    find = f"document.querySelector('#figure-{figure} .plot > svg')"
    box = browser.ask(
        f"(() => {{ const e = {find}; e.scrollIntoView({{block: 'center', behavior: 'instant'}}); "
        f"const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; }})()"
    )
    return box[0] + across * box[2], box[1] + down * box[3]


def tip(browser, figure):
    return browser.ask(
        f"(() => {{ const t = document.querySelector('#figure-{figure} .tip'); return t.hidden ? "
        f"'' : t.innerText; }})()"
    )


@pytest.mark.parametrize(
    ("page", "figure", "words"),
    [
        ("run", "loss", ("step ", " s", "training", "test loss")),
        ("run", "norms", ("step ", "W", "b_o")),
        ("run", "costates", ("step ", "t = ", "log₁₀ ‖λₜ‖")),
        ("chain", "costates", ("step ", "layer ", "log₁₀ ‖λᵢ‖")),
        ("chain", "norms-0", ("step ", "layer ", "log₁₀ norm of the gradient")),
        ("chain", "pictures", ("sample ", "row ", "column ", "target four, prediction nine")),
        ("autoencoder", "pictures", ("sample ", "noisy input", "reconstruction", "clean target")),
        ("chains", "depth-before", ("layer ", "plain, seed 0", "plain, seed 1")),
        ("compare", "share", ("step ", "penalised", "plain")),
        ("compare", "curves", ("step ", "seed ")),
        ("compare", "steps", ("seed ",)),
        ("numbers", "against-1", ("row ", "true heat", "prediction of heat")),
        ("numbers", "histogram-1", (" to ", "test", "%")),
        ("forecast", "series-0", ("2020-0", "true", "forecast")),
        ("steps", "step-accuracy", ("step of the sequence ", "test", "valid")),
        ("diagnosis", "diagnostic-0", ("time step k ", "joint", "W")),
        ("diagnosis", "diagnostic-12", ("(", ", ", "loss")),
    ],
)
def test_pointing_shows_values(browser, pages, page, figure, words):
    browser.open(pages[page])
    assert tip(browser, figure) == ""
    x, y = place(browser, figure)
    browser.mouse("mouseMoved", x, y)
    assert all(word in tip(browser, figure) for word in words), tip(browser, figure)
    first = tip(browser, figure)
    browser.mouse("mouseMoved", *place(browser, figure, 0.8, 0.3))
    assert tip(browser, figure) not in ("", first)
    browser.mouse("mouseMoved", 2, 2)
    assert tip(browser, figure) == ""
    assert browser.complaints() == []


def test_the_values_shown_are_those_recorded(browser, pages):
    """At the right end of the held-out curve: the last evaluation, and the time on the clock."""
    browser.open(pages["run"])
    browser.mouse("mouseMoved", *place(browser, "held-out-0", 0.995))
    assert "step 5,000 · 46 s" in tip(browser, "held-out-0")
    assert tip(browser, "held-out-0").split()[-1] == "1"


def test_rows_with_times_have_no_numbers_below_them(browser, pages):
    """The axis of a series that begins at row 1 does not reach back to 0."""
    browser.open(pages["forecast"])
    place(browser, "series-0")
    below = browser.ask(
        "[...document.querySelectorAll('#figure-series-0 .plot > svg text[text-anchor=middle]')]"
        ".map(text => text.textContent)"
    )
    assert below
    assert all(text.startswith("2020-") for text in below), below


def test_the_steps_of_costates_end_at_the_last_probe(browser, pages):
    """The probes of a short run are far apart: the last one has no room beyond it."""
    browser.open(pages["two probes"])
    x, _ = place(browser, "costates")  # scrolls to it
    numbers = browser.ask(
        "[...document.querySelectorAll('#figure-costates .plot > svg text[text-anchor=end]')]"
        ".map(text => text.textContent).filter(text => /^[0-9]+$/.test(text)).map(Number)"
    )
    assert numbers
    top, bottom = browser.ask(
        "(() => { const b = document.querySelector('#figure-costates svg .blank')"
        ".getBoundingClientRect(); return [b.top, b.bottom]; })()"
    )
    steps = []
    for at in (top + 2, bottom - 2):
        browser.mouse("mouseMoved", x, at)
        steps.append(int(re.match(r"step (\d+)", tip(browser, "costates"))[1]))
    assert steps[1] <= min(numbers) < max(numbers) <= steps[0]


def test_the_value_of_a_pixel_is_the_one_recorded(browser, pages):
    """The last pixel of the first sample, in all three pictures of its column."""
    browser.open(pages["autoencoder"])
    place(browser, "pictures")  # scrolls to it
    x, y = browser.ask(
        "(() => { const b = document.querySelector('#figure-pictures image')"
        ".getBoundingClientRect(); return [b.right - 3, b.bottom - 3]; })()"
    )
    browser.mouse("mouseMoved", x, y)
    assert tip(browser, "pictures").split("\n") == [
        "sample 0 · row 1, column 1",
        "noisy input",
        "1",
        "reconstruction",
        "1",
        "clean target",
        "1",
    ]
    browser.mouse(
        "mouseMoved",
        x,
        browser.ask(
            "document.querySelector('#figure-pictures image').getBoundingClientRect().top + 3"
        ),
    )
    assert "row 0, column 1" in tip(browser, "pictures")
    assert "0.25" in tip(browser, "pictures")


def test_a_value_of_another_step_names_its_step(browser, pages):
    """Every step has a training loss, every hundredth a held-out one."""
    browser.open(pages["run"])
    browser.mouse("mouseMoved", *place(browser, "loss", 0.6))
    step = int(re.search(r"step ([\d,]+)", tip(browser, "loss"))[1].replace(",", ""))
    at = round(step / 100) * 100
    assert step % 100 == 0 or f"test loss at {at:,}" in tip(browser, "loss").replace("\n", " ")


def test_touch_shows_values_and_a_touch_elsewhere_puts_them_away(browser, pages):
    browser.open(pages["run"], **SCREENS["phone, dark"])
    x, y = place(browser, "gradient")
    for kind, points in (("touchStart", [{"x": x, "y": y}]), ("touchEnd", [])):
        browser.send("Input.dispatchTouchEvent", type=kind, touchPoints=points)
    assert "step " in tip(browser, "gradient")
    inside = browser.ask(
        "(() => { const b = document.querySelector('#figure-gradient "
        ".tip').getBoundingClientRect(); return b.left >= 0 && b.right <= innerWidth; })()"
    )
    assert inside
    x, y = browser.ask(
        "(() => { const b = document.querySelector('#figure-gradient h3').getBoundingClientRect(); "
        "return [b.left + 5, b.top + 5]; })()"
    )
    for kind, points in (("touchStart", [{"x": x, "y": y}]), ("touchEnd", [])):
        browser.send("Input.dispatchTouchEvent", type=kind, touchPoints=points)
    assert tip(browser, "gradient") == ""


@pytest.mark.parametrize(
    ("page", "figure"),
    [
        ("run", "radius"),
        ("run", "costates"),
        ("chain", "pictures"),
        ("autoencoder", "pictures"),
        ("compare", "steps"),
        ("compare", "curves"),
    ],
)
def test_keys_read_values(browser, pages, page, figure):
    browser.open(pages[page])
    place(browser, figure)
    browser.key("Tab")  # so that focus is shown as for a keyboard
    browser.ask(f"document.querySelector('#figure-{figure} .plot > svg').focus()")
    seen = [tip(browser, figure)]
    for key in ("Home", "ArrowRight", "ArrowRight"):
        browser.key(key)
        seen.append(tip(browser, figure))
    assert all(seen)
    assert len(set(seen[1:])) == 3, seen
    browser.key("Escape")
    assert tip(browser, figure) == ""


def test_every_figure_can_be_reached_by_tab(browser, pages):
    browser.open(pages["run"])
    reached = set()
    for _ in range(60):
        browser.key("Tab")
        reached.add(browser.ask("document.activeElement.closest('figure')?.id ?? ''"))
    assert len(reached - {""}) == FIGURES["run"]


def test_the_legend_hides_a_series(browser, pages):
    browser.open(pages["run"])
    count = "document.querySelectorAll('#figure-norms .plot .trace').length"
    before = browser.ask(count)
    browser.ask("document.querySelector('#figure-norms .legend button').click()")
    assert browser.ask(count) == before - 1
    assert (
        browser.ask(
            "document.querySelector('#figure-norms .legend button').getAttribute('aria-pressed')"
        )
        == "false"
    )
    for _ in range(before - 1):
        browser.ask(
            "document.querySelector('#figure-norms .legend button[aria-pressed=true]').click()"
        )
    assert browser.ask(count) == 0
    assert browser.complaints() == []


def test_figures_follow_the_width(browser, pages):
    browser.open(pages["run"])
    width = "document.querySelector('#figure-loss .plot > svg').viewBox.baseVal.width"
    wide = browser.ask(width)
    browser.send(
        "Emulation.setDeviceMetricsOverride",
        width=390,
        height=844,
        deviceScaleFactor=1,
        mobile=False,
    )
    browser.ask("new Promise(done => setTimeout(done, 150))")
    assert browser.ask(width) < wide - 100
    assert browser.ask("document.documentElement.scrollWidth") <= 390


def test_print_is_dark_on_white(browser, pages):
    browser.open(pages["run"], dark=True)
    browser.send(
        "Emulation.setEmulatedMedia",
        media="print",
        features=[{"name": "prefers-color-scheme", "value": "dark"}],
    )
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.ask("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert browser.ask("getComputedStyle(document.querySelector('nav')).display") == "none"


def test_without_script_the_tables_remain(browser, pages):
    browser.open(pages["compare"], script=False)
    text = browser.send("Page.captureSnapshot")["data"]
    assert browser.complaints() == []
    document = browser.send("DOM.getDocument")["root"]["nodeId"]

    def find(what):
        return browser.send("DOM.querySelectorAll", nodeId=document, selector=what)["nodeIds"]

    assert len(find("noscript p")) == 1
    assert len(find("table")) >= 5
    assert find(".plot > svg") == []
    assert text


def test_policy_stops_what_it_should(browser, pages):
    """The checks above can fail: a script and a style that are not the page's own are refused, and
    reported.
    """
    browser.open(pages["run"])
    browser.ask(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.mine = 1'; "
        "document.body.append(s); })()"
    )
    browser.ask("document.body.setAttribute('style', 'color: red')")
    assert browser.ask("window.mine === undefined")
    assert len(browser.complaints()) >= 2
