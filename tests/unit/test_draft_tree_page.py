"""The page of whole generations: what it holds, and what a browser makes of it."""

from __future__ import annotations

import html
import json
import os
import re
import shutil

import pytest

import draft_tree_sample as sample
from draft_tree_page import pieces, write_page
from draft_tree_view import Generation, Step, pick_step, read_trace, visible

PHONE, DESKTOP = (390, 844), (1280, 800)


@pytest.fixture(scope="module")
def words() -> sample.Words:
    return sample.Words()


@pytest.fixture(scope="module")
def trace(words, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    return read_trace(sample.write(path, sample.records(words)))


@pytest.fixture(scope="module")
def generations(trace):
    """The last request's first step drafts hostile tokens and accepts one."""
    found = [Generation(q, s) for q, s in zip(sample.QUESTIONS, trace.requests.values())]
    ids = sample.Words().ids
    traps = [ids[t] for t in sample.TRAPS]
    first = Step(
        "3", 0, 9, ids["The"], tuple(traps), (0,) * len(traps), (-1.0,) * len(traps), (1,), traps[3]
    )
    return [*found, Generation("<b>Is markup & such inert?</b>", [first])]


@pytest.fixture(scope="module")
def page(tmp_path_factory, trace, generations, words):
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_page(path, generations, trace.header, words.decode)
    return path


def data(page) -> dict:
    found = re.search(
        r'<script type="application/json" id="trace">(.*?)</script>', page.read_text(), re.S
    )
    return json.loads(found[1])


def answers(page) -> list[str]:
    found = re.findall(r'<div class="answer">(.*?)</div>', page.read_text(), re.S)
    return [html.unescape(re.sub(r"<[^>]*>", "", one)) for one in found]


def test_answers_are_in_the_html(page, generations, words):
    assert answers(page) == [words.decode(g.tokens) for g in generations]
    assert answers(page)[:3] == list(sample.ANSWERS)


def test_segments_tell_chain_side_branch_and_bonus_apart(page, generations, words):
    found = re.findall(r'<a href="#q1-s(\d+)">(.*?)</a>', page.read_text(), re.S)
    assert len(found) == len(generations[0].steps)
    for (_, inside), step in zip(found, generations[0].steps):
        *accepted, bonus = step.emitted
        want = [
            ("chain", words.decode(accepted[: step.on_chain])),
            ("side", words.decode(accepted[step.on_chain :])),
            ("bonus", words.decode([bonus])),
        ]
        seen = [
            (k, html.unescape(t))
            for k, t in re.findall(r'<span class="(\w+)">(.*?)</span>', inside, re.S)
        ]
        assert seen == [(kind, text) for kind, text in want if text]


def test_trees_are_in_the_json(page, generations, words):
    found = data(page)
    for run, generation in zip(found["runs"], generations):
        for tree, step in zip(run, generation.steps, strict=True):
            root, tokens, parents, logprobs, accepted, on_chain, bonus = tree
            assert found["words"][root] == visible(words.texts[step.root])
            assert [found["words"][t] for t in tokens] == [
                visible(words.texts[t]) for t in step.tokens
            ]
            assert (tuple(parents), tuple(accepted), on_chain) == (
                step.parents,
                step.accepted,
                step.on_chain,
            )
            assert logprobs == pytest.approx(step.logprobs, abs=1e-3)
            assert found["words"][bonus] == visible(words.texts[step.bonus])


def test_no_token_becomes_markup(page):
    text = page.read_text()
    # The page's own: the class for JavaScript, the data, the program.
    assert len(re.findall(r"<script", text)) == 3 == len(re.findall(r"</script", text))
    assert "<b>Is markup" not in text and "&lt;b&gt;Is markup &amp; such inert?" in text


def test_nothing_is_fetched(page):
    text = page.read_text()
    assert not re.search(r"https?://(?!www\.w3\.org/)|@import|url\(|\bsrc=", text)


def test_without_javascript_there_is_each_first_tree(page, generations, words):
    found = re.findall(r"<noscript>(.*?)</noscript>", page.read_text(), re.S)
    assert len(found) == len(generations)
    for inside, generation in zip(found, generations):
        assert inside.count("✔ ") == len(generation.steps[0].accepted)
        assert "★ " in inside


def test_the_step_worth_showing_is_linked(page, generations):
    step = pick_step(generations[0].steps)
    assert f'class="best" href="#q1-s{step.number + 1}"' in page.read_text()


def test_three_long_answers_stay_small(tmp_path, words):
    path = sample.write(tmp_path / "t.jsonl", sample.records(words, repeat=3))
    trace = read_trace(path)
    runs = [Generation(q, s[:35]) for q, s in zip(sample.QUESTIONS, trace.requests.values())]
    assert [len(r.steps) for r in runs] == [35] * 3
    write_page(tmp_path / "p.html", runs, trace.header, words.decode)
    assert (tmp_path / "p.html").stat().st_size < 400_000


def test_a_page_of_nothing_is_refused(tmp_path, trace):
    for runs in ([], [Generation("Why?", [])]):
        with pytest.raises(ValueError):
            write_page(tmp_path / "p.html", runs, trace.header, str)
    assert not (tmp_path / "p.html").exists()


def test_characters_of_several_tokens_come_whole():
    raw = [
        "é".encode()[:1],
        "é".encode()[1:],
        *[b" x"] * 40,
        "语".encode()[:2],
        "语".encode()[2:],
        b"!",
    ]

    def decode(tokens):
        return b"".join(raw[t] for t in tokens).decode(errors="replace")

    found = pieces(list(range(len(raw))), decode)
    assert "".join(found) == "é" + " x" * 40 + "语!"
    assert (found[0], found[1], found[2], found[-3:]) == ("", "é", " x", ["", "语", "!"])


# --- in a browser ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    """System Chromium; playwright's own would be a download."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
    found = next((p for p in map(shutil.which, names) if p), None)
    if not found:
        pytest.skip("no Chromium on PATH: apt-get install chromium")
    with api.sync_playwright() as p:
        # Chromium's sandbox refuses root.
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        try:
            browser = p.chromium.launch(executable_path=found, args=flags)
        except api.Error as err:
            pytest.skip(f"{found} does not start: {err.message.splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, page):
    """Open the page at a size; afterwards it must have been quiet."""
    contexts, faults = [], []

    def open_page(size=DESKTOP, at="", **options):
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda m: faults.append(f"console: {m.text}"))
        tab.on("pageerror", lambda e: faults.append(f"error: {e}"))
        tab.on(
            "request",
            lambda r: (
                r.url.split("#")[0] in (page.as_uri(), "data:,")
                or faults.append(f"request: {r.url}")
            ),
        )
        tab.goto(page.as_uri() + at)
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def drawn(tab, kind: str) -> list[tuple[int, str]]:
    """Row and text of the nodes of a kind, from the root on."""
    return tab.eval_on_selector_all(
        f".box .node{kind}",
        """nodes => nodes.map(n => [+n.dataset.row, n.querySelector('title').textContent.split(' · ')[0]])
                         .sort((a, b) => a[0] - b[0])""",
    )


def overflow(tab) -> int:
    return tab.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )


@pytest.mark.parametrize("size", [PHONE, DESKTOP, (320, 640), (768, 1024)])
def test_every_tree_is_drawn_as_traced_and_never_scrolls_the_page(visit, generations, words, size):
    tab = visit(size)
    for q, generation in enumerate(generations, 1):
        for s, step in enumerate(generation.steps, 1):
            tab.evaluate(f"location.hash = 'q{q}-s{s}'")
            tab.wait_for_function(
                f"document.querySelector('#where').textContent.endsWith('{s} / {len(generation.steps)}')"
            )
            tab.wait_for_function(f"!document.querySelector('#q{q}').hidden")
            assert len(drawn(tab, "")) == len(step.tokens) + 2
            want = [[row, visible(words.texts[step.tokens[row - 1]])] for row in step.accepted]
            assert drawn(tab, ".accepted") == want
            assert drawn(tab, ".chain") == want[: step.on_chain]
            assert drawn(tab, ".bonus") == [
                [len(step.tokens) + 1, visible(words.texts[step.bonus])]
            ]
            assert overflow(tab) == 0
    assert tab.locator(".question:visible").count() == 1


@pytest.mark.parametrize("size", [PHONE, DESKTOP])
def test_no_two_nodes_overlap(visit, generations, size):
    tab = visit(size)
    for s in range(1, 6):
        tab.evaluate(f"location.hash = 'q2-s{s}'")
        tab.wait_for_function(f"document.querySelector('#where').textContent.includes('{s} / 16')")
        clashes = tab.evaluate(
            """() => {
              const all = [...document.querySelectorAll('.box rect')].map(r => r.getBoundingClientRect());
              return all.filter((a, i) => all.some((b, j) => j > i && a.left < b.right && b.left < a.right
                && a.top < b.bottom && b.top < a.bottom)).length;
            }"""
        )
        assert clashes == 0


def test_buttons_keys_slider_and_segments_move(visit):
    tab = visit()
    seen = []

    def moved(where: str) -> None:
        tab.wait_for_function(f"location.hash === '#{where}'")
        tree = tab.inner_html(".box")
        assert tree not in seen
        seen.append(tree)
        current = tab.locator(".question:visible a[aria-current=step]")
        assert current.get_attribute("href") == f"#{where}"

    assert tab.get_by_role("button", name="Previous step").is_disabled()
    tab.get_by_role("button", name="Next step").click()
    moved("q1-s2")
    tab.keyboard.press("ArrowRight")
    moved("q1-s3")
    tab.locator("#slider").fill("5")
    moved("q1-s5")
    tab.locator("#slider").press("ArrowRight")
    moved("q1-s6")
    tab.locator('.answer a[href="#q1-s9"]').click()
    moved("q1-s9")
    tab.get_by_role("link", name=sample.QUESTIONS[1]).click()
    moved("q2-s1")
    seen.clear()
    tab.locator("body").press("ArrowRight")
    tab.locator("body").press("ArrowLeft")
    moved("q2-s1")
    tab.locator("body").press("ArrowLeft")
    assert tab.evaluate("location.hash") == "#q2-s1"


def test_play_runs_to_the_end_and_can_be_paused(visit):
    tab = visit(at="#q1-s12")
    # Paused, or a slow machine would play on between the calls.
    tab.clock.install(time="2026-01-01")
    tab.clock.pause_at("2026-01-02")
    tab.get_by_role("button", name="Play").click()
    assert tab.get_by_role("button", name="Pause").is_visible()
    tab.clock.run_for(10_000)
    assert tab.evaluate("location.hash") == "#q1-s13"
    tab.get_by_role("button", name="Play").click()
    tab.clock.run_for(3_000)
    tab.get_by_role("button", name="Pause").click()
    tab.clock.run_for(10_000)
    assert tab.evaluate("location.hash") == "#q1-s3"


@pytest.mark.parametrize(
    "at, where",
    [
        ("#q2-s5", "Step 5 / 16"),
        ("#q1-s999", "Step 13 / 13"),
        ("#q3", "Step 1 / 19"),
        ("#other", "Step 1 / 13"),
    ],
)
def test_deep_links(visit, at, where):
    assert visit(at=at).inner_text("#where") == where


def test_the_path_is_in_sight_on_a_phone(visit, generations):
    """On a narrow screen it goes straight down, wherever the tree branches."""
    step = pick_step(generations[0].steps).number + 1
    tab = visit(PHONE, f"#q1-s{step}")
    for node in tab.locator(".box .accepted rect, .box .bonus rect").all():
        box = node.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= PHONE[0]


def test_hostile_tokens_are_inert(visit):
    tab = visit(at="#q4-s1")
    assert tab.title() == "Draft trees, step by step"
    assert drawn(tab, ".accepted") == [[1, visible(sample.TRAPS[0])]]
    assert tab.locator(".box script, .answer script, .said script, h2 b").count() == 0
    assert sample.TRAPS[0] in tab.inner_text("#q4 .answer")


def test_names_for_those_who_do_not_see_it(visit):
    tab = visit()
    assert tab.get_by_role("img", name="Draft tree of step 1, 63 nodes").count() == 1
    unnamed = "[...document.querySelectorAll('button, input')].filter(e => !e.getAttribute('aria-label')).length"
    assert tab.evaluate(unnamed) == 0


def test_without_javascript(visit):
    tab = visit(PHONE, java_script_enabled=False)
    assert tab.locator(".answer:visible").count() == 4
    assert tab.locator("pre:visible").count() == 4
    assert not tab.locator(".stage").is_visible()
    # Nothing may be measured from outside without scripts; a screenshot is as wide as the page.
    assert int.from_bytes(tab.screenshot(full_page=True)[16:20]) == PHONE[0]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_schemes(visit, scheme):
    tab = visit(color_scheme=scheme)
    ratio = tab.evaluate(
        """() => {
          const light = c => c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
            .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
            .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
          const worst = (text, under) => {
            const [a, b] = [light(text), light(under)].sort((x, y) => y - x);
            return (a + .05) / (b + .05);
          };
          const of = (selector, name) => getComputedStyle(document.querySelector(selector))[name];
          return Math.min(
            worst(of('.said .what', 'color'), of('.stage', 'backgroundColor')),
            worst(of('.box .node:not(.accepted):not(.root):not(.bonus) .odds', 'fill'), of('.box .node:not(.accepted):not(.root):not(.bonus) rect', 'fill')),
            worst(of('.box .chain .odds', 'fill'), of('.box .node.chain rect', 'fill')),
            worst(of('.box .bonus .odds', 'fill'), of('.box .node.bonus rect', 'fill')));
        }"""
    )
    assert ratio >= 4.5
