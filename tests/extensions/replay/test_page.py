"""The report of a replay: correct figures, safe, self-contained, and readable on a phone."""

from __future__ import annotations

import math
import random
import re
from html.parser import HTMLParser

import pytest

from freetrain_parsl.extensions.replay.page.frame import write_page
from freetrain_parsl.extensions.replay.page.wording import count, duration, milliseconds, percent, samples

HOSTILE = "<script>alert('1')</script>&\"<img src=http://example.org/x onerror=alert(2)>"
LOSSES = ("concavity", "unused", "split", "rescale", "preemption", "start")


def make_policy(policy="milp", *, trainers=3, bins=60, seed=0, finite=False, knowledge="none", horizon=120.0):
    """Make a policy's entry with plausible figures."""
    rng = random.Random(seed)
    idle = [80 + 60 * math.sin(i / 9) + 40 * rng.random() for i in range(bins)]
    names = [f"ShuffleNet-{i}" for i in range(trainers)]
    used = {name: [0.9 * nodes / trainers for nodes in idle] for name in names}
    efficiency = 0.85 + 0.05 * rng.random()
    parts = dict(zip(LOSSES, (0.075, 0.01, 0.004, 0.02, 0.021, 0.0), strict=True))
    rest = (1 - efficiency) / sum(parts.values())
    hours = 1000.0 * bins / 3600
    return {
        "policy": policy,
        "knowledge": knowledge,
        "horizon": horizon,
        "efficiency": efficiency,
        "oracle": 0.925,
        "oracle_ratio": efficiency / 0.925,
        **{f"loss_{cause}": rest * share for cause, share in parts.items()},
        "events": 7212,
        "solves": 7100,
        "solve_ms": {"median": 3.2, "p99": 21.0, "max": 1450.0},
        "proven_optimal_share": 1.0,
        "wall_seconds": 41.0,
        "refused": 0,
        "jct": {
            "finished": trainers if finite else 0,
            **dict.fromkeys(("mean", "median", "p95"), 8e4 if finite else None),
        },
        "node_hours": {"idle": sum(idle) * hours / bins, "used": 0.9 * sum(idle) * hours / bins},
        "used_by_kind": {},
        "idle_cost": None,
        "trainers": [
            {
                "name": name,
                "submitted": 0.0,
                "started": 12.0,
                "finished": 8e4 if finite else None,
                "samples": 3.2e8,
                "work": 3.2e8 if finite else None,
                "node_hours": 0.9 * sum(idle) * hours / bins / trainers,
                "rescales": 400 + i,
                "preemptions": 90,
            }
            for i, name in enumerate(names)
        ],
        "series": {
            "time": [1000.0 * i for i in range(bins)],
            "bin_seconds": 1000.0,
            "idle": idle,
            "used": used,
            "efficiency": [None, *(efficiency + 0.3 * rng.uniform(-1, 1) / i for i in range(1, bins))],
            "oracle": [None, *(0.925 + 0.2 * rng.uniform(-1, 1) / i for i in range(1, bins))],
        },
        "solve_histogram": {
            "edges_ms": [2.0**i for i in range(-1, 12)],
            "counts": [10, 300, 3000, 2500, 800, 300, 120, 40, 20, 6, 3, 1],
        },
    }


def make_result(*policies, **log):
    """Make a complete result from these policies' entries."""
    entries = list(policies) or [make_policy()]
    seconds = 1000.0 * len(entries[0]["series"]["time"])
    return {
        "log": {
            "name": "idle-nodes.csv.gz",
            "nodes": 1024,
            "start": 0.0,
            "end": seconds,
            "seconds": seconds,
            "events": 7212,
            "mean_idle": 85.1,
            "median_idle": 40,
            "skipped": 0,
            "zero_length": 0,
            "masked": [],
            "date": None,
        }
        | log,
        "trainers": {"spec": "hpo:3", "count": len(entries[0]["trainers"]), "objective": "throughput"},
        "notes": [],
        "cost": "paper",
        "curves": "known",
        "blocks_start_in": None,
        "version": "0.1.0",
        "command": "freetrain replay idle-nodes.csv.gz --trainers hpo:3 --policy milp",
        "policies": entries,
    }


class Reader(HTMLParser):
    """Collects the content of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data.replace("\N{NO-BREAK SPACE}", " ")

    def count(self, tag):
        return sum(name == tag for name, _ in self.tags)


@pytest.fixture
def page(tmp_path):
    """Write a result's page and return its text."""

    def write(result) -> str:
        write_page(result, tmp_path / "report.html")
        return (tmp_path / "report.html").read_text(encoding="utf-8")

    return write


def hostile_result():
    """Put markup wherever user-supplied text may appear."""
    entry = make_policy(HOSTILE)
    entry["trainers"][0]["name"] = HOSTILE
    entry["series"]["used"][HOSTILE] = entry["series"]["used"].pop("ShuffleNet-0")
    result = make_result(entry, name=HOSTILE)
    result["command"] = f"freetrain replay {HOSTILE}"
    result["trainers"]["spec"] = result["trainers"]["objective"] = HOSTILE
    return result


def test_words_of_users_never_become_markup(page):
    """Names of training jobs, logs and policies are plain text wherever they appear."""
    reader = Reader(page(hostile_result()))
    assert reader.count("script") == reader.count("img") == 0
    assert reader.text.count(HOSTILE) >= 6


@pytest.mark.parametrize("result", [make_result(), hostile_result()], ids=["plain", "hostile"])
def test_nothing_is_loaded(page, result):
    """No element or style refers to external resources, and the page's policy forbids them."""
    text = page(result)
    reader = Reader(text)
    attributes = {name for _, attrs in reader.tags for name in attrs}
    assert not attributes & {"src", "href", "srcset", "xlink:href", "action", "data", "poster", "onload", "onerror"}
    assert not {tag for tag, _ in reader.tags} & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    assert not re.search(r"url\(|@import|@font-face|expression\(", style)
    (policy,) = (attrs["content"] for _, attrs in reader.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';")
    assert "script-src" not in policy


def test_the_headline_tells_the_result(page):
    """Two sentences contain the mean, the efficiency and the dedicated nodes."""
    entry = make_policy() | {"efficiency": 0.892}
    text = " ".join(Reader(page(make_result(entry))).text.split())
    assert "Your idle nodes: 85.1 of 1,024 on average" in text
    assert "Training in them would have done 89 % of what 85.1 dedicated nodes do" in text


def test_the_best_policy_leads(page):
    """Key figures are the best policy's; every policy has a column, bars and a section, one of them open."""
    worse = make_policy("equal-share") | {"efficiency": 0.802}
    better = make_policy("milp") | {"efficiency": 0.892}
    reader = Reader(page(make_result(worse, better)))
    assert "planned by milp, the best of 2 plans compared" in reader.text
    parts = [attrs for tag, attrs in reader.tags if tag == "details"]
    assert ["open" in attrs for attrs in parts] == [True, False]
    assert sum(attrs.get("scope") == "col" for _, attrs in reader.tags) == 2 + 2 * 5
    assert sum(attrs.get("class") == "bar" for _, attrs in reader.tags) == 4


def test_the_headline_is_of_a_plan_that_can_be_had(page):
    """A policy with known closings is better, but comes last."""
    known, unknown = make_policy(seed=1, knowledge="perfect"), make_policy(seed=2)
    known["efficiency"], unknown["efficiency"] = 0.91, 0.871
    text = Reader(page(make_result(known, unknown))).text
    assert "would have done 87 % of" in text
    assert text.index("milp, closing times unknown: 87.1 %") < text.index("milp, closing times known: 91.0 %")
    alone = Reader(page(make_result(known))).text
    assert "an upper bound that no real plan can reach, training in them would have done 91 %" in alone


def test_dates_stand_at_the_axis_and_in_the_heading(page):
    """Two days of data; removed times are reported."""
    week = make_result(make_policy(bins=173), date="2026-01-30T00:00:00", masked=[[86400.0, 432000.0]], zero_length=3)
    text = Reader(page(week)).text
    assert "30 Jan 2026 to 6 Feb 2026" in text
    assert "31 Jan" in text
    assert "5 days that look like outages were removed and are excluded from all figures." in text
    assert "3 jobs of less than a second" in text


def test_what_if_is_a_table_if_it_was_computed(page):
    result = make_result()
    assert "What if" not in Reader(page(result)).text
    result["what_if"] = {
        "rescale_factors": [0.5, 1.0],
        "start_seconds": [0.0, 60.0],
        "efficiency": [[0.9, 0.8], [0.7, None]],
    }
    text = Reader(page(result)).text
    assert "Rescalingfree60 s0.5 times90.0 %80.0 %as given70.0 %\N{EN DASH}" in text


def test_notes_stand_under_the_headline(page):
    assert "one trainer can" not in Reader(page(make_result())).text
    assert "one trainer can" in Reader(page(make_result() | {"notes": ["one trainer can use"]})).text


def test_the_page_states_how_curves_are_known_and_nodes_obtained(page):
    assert "blocks" not in Reader(page(make_result())).text
    text = Reader(page(make_result() | {"curves": "default", "blocks_start_in": 20.0})).text
    assert "assumed the default scaling curve. Nodes were requested as blocks, which train 20 s after" in text


def test_bars_add_up_to_the_whole(page):
    """Efficiency and losses fill the bar; a gain, that is, a negative loss, does not change the total."""
    entry = make_policy()
    entry["loss_split"] -= 0.01
    entry["loss_concavity"] -= 0.05
    entry["efficiency"] += 0.06
    assert entry["loss_split"] < 0
    text = page(make_result(entry))
    for bar in re.findall(r'<svg[^>]*class="bar">.*?</svg>', text):
        assert sum(float(width) for width in re.findall(r' width="([\d.]+)"', bar)) == pytest.approx(1000, abs=0.1)
    assert "-" in percent(entry["loss_split"])
    assert percent(entry["loss_split"]) in text


def test_jobs_that_finish_have_times(page):
    """If there is work to finish, the report shows how much was done and how long it took."""
    finite = Reader(page(make_result(make_policy(finite=True)))).text
    assert "Training jobs finished" in finite
    assert "Mean time to finish" in finite
    endless = Reader(page(make_result(make_policy()))).text
    assert "They are endless" in endless
    assert "Mean time to finish" not in endless


def test_unfinished_work_shows_its_share(page):
    """A training job that did not finish shows its progress."""
    entry = make_policy(finite=True)
    entry["trainers"][0] |= {"finished": None, "samples": 0.8e8}
    assert "25 %" in Reader(page(make_result(entry))).text


def test_price_of_idle_nodes_is_shown_if_there_is_one(page):
    """The value of idle node-hours appears with the price."""
    entry = make_policy() | {"idle_cost": {"price_per_node_hour": 1.5, "idle": 21450.0, "used": 20100.0}}
    text = Reader(page(make_result(entry))).text
    assert "20,100" in text
    assert "of 21,450 idle, at 1.5 a node-hour" in text


@pytest.mark.parametrize("efficiency", [0.0, None])
def test_a_log_without_idle_nodes_has_a_page(page, efficiency):
    """Without idle nodes and training, the page has an explanation, and there is no division by zero."""
    entry = make_policy(trainers=2)
    bins = len(entry["series"]["time"])
    entry |= {"efficiency": efficiency, "oracle": efficiency, "oracle_ratio": None}
    entry |= {f"loss_{cause}": 0.0 for cause in LOSSES}
    entry |= {"node_hours": {"idle": 0.0, "used": 0.0}, "solves": 0, "proven_optimal_share": None}
    entry |= {
        "solve_ms": dict.fromkeys(("median", "p99", "max")),
        "solve_histogram": {"edges_ms": [1, 2], "counts": [0]},
    }
    entry["series"] |= {"idle": [0.0] * bins, "efficiency": [None] * bins, "oracle": [None] * bins}
    entry["series"]["used"] = {name: [0.0] * bins for name in entry["series"]["used"]}
    for trainer in entry["trainers"]:
        trainer |= {"samples": 0, "node_hours": 0.0, "started": None}
    text = Reader(page(make_result(entry, mean_idle=0.0, median_idle=0, events=0))).text
    assert "None of the 1,024 nodes was idle" in text
    assert "nan" not in text.lower()


def test_many_trainers_are_summed_up(page):
    """Of a thousand training jobs, ten have a colour and fifty a row; the rest is summed up."""
    text = page(make_result(make_policy(trainers=1000)))
    assert "990 others" in text
    assert "the other 950 are in the JSON file" in text
    assert len(text) < 200_000


def test_a_week_of_five_policies_stays_small(page):
    """Five policies of 20 training jobs and 600 bins make a page below 500 kB."""
    entries = [make_policy(f"policy-{i}", trainers=20, bins=600, seed=i) for i in range(5)]
    assert len(page(make_result(*entries)).encode()) < 500_000


def test_pictures_and_tables_can_be_heard(page):
    """Each chart has a title and a description, each table has headers, and scrolling boxes accept the keyboard."""
    reader = Reader(page(make_result(make_policy(), make_policy("equal-share"))))
    pictures = [attrs for tag, attrs in reader.tags if tag == "svg"]
    assert all(attrs.get("role") == "img" for attrs in pictures)
    assert reader.count("desc") == len(pictures) > 0
    assert reader.count("table") == 3
    assert all("scope" in attrs for tag, attrs in reader.tags if tag == "th")
    boxes = [attrs for _, attrs in reader.tags if attrs.get("class") == "scroll"]
    assert all(attrs["tabindex"] == "0" and attrs["aria-label"] for attrs in boxes)
    assert ("html", {"lang": "en"}) in reader.tags


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (percent(0.8921), "89.2 %"),
        (percent(-0.0001), "0.0 %"),
        (percent(None), "\N{EN DASH}"),
        (percent(float("nan")), "\N{EN DASH}"),
        (count(14302.4), "14,302"),
        (count(3.25), "3.2"),
        (count(40), "40"),
        (samples(999.6e3), "1 M"),
        (samples(12345), "12.3 k"),
        (samples(7), "7"),
        (duration(604800), "7 days"),
        (duration(1234 * 86400), "1,234 days"),
        (duration(8e4), "22.2 h"),
        (duration(600), "10 min"),
        (duration(0.25), "0.25 s"),
        (milliseconds(3.217), "3.22 ms"),
        (milliseconds(1450), "1.45 s"),
    ],
)
def test_figures_are_written_for_people(written, expected):
    """Units, thousands separators, and a dash for missing figures."""
    assert written.replace("\N{NO-BREAK SPACE}", " ") == expected


def dated_result():
    table = {"rescale_factors": [0.5, 1.0], "start_seconds": [0.0, 60.0], "efficiency": [[0.9, 0.8], [0.7, 0.6]]}
    dates = {"date": "2026-01-30T12:00:00+00:00", "masked": [[86400.0, 432000.0]], "zero_length": 3}
    notes = ["5 trainers of at most 10 nodes can use at most 50 of the 85.1 nodes that are idle on average"]
    return make_result(make_policy(bins=400), **dates) | {"what_if": table, "notes": notes}


PAGES = {
    "dates and notes": dated_result(),
    "plain": make_result(make_policy(bins=400), make_policy("equal-share", seed=1, bins=400)),
    "finite": make_result(*(make_policy(f"policy-{i}", trainers=60, seed=i, finite=True) for i in range(5))),
    "hostile": hostile_result(),
    "long names": make_result(make_policy("a" * 90, horizon="adaptive"), name="b" * 200),
}


@pytest.mark.browser
@pytest.mark.parametrize(("width", "height"), [(360, 740), (1280, 900)], ids=["phone", "desktop"])
@pytest.mark.parametrize("name", PAGES)
def test_a_browser_shows_the_page(chromium, tmp_path, name, width, height):
    """No requests, no console messages; the page fits the window's width, and all text is readable."""
    path = tmp_path / "report.html"
    write_page(PAGES[name], path)
    chromium.open(path, width=width, height=height)
    assert chromium.requests() == [path.as_uri()]
    assert chromium.complaints() == []
    chromium.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    assert chromium.evaluate(_SMALLEST_TEXT) >= 14
    assert chromium.evaluate(_OUTSIDE) == []
    cards = chromium.evaluate(
        "[...document.querySelectorAll('.cards .value')].map(e => e.checkVisibility() && e.innerText)"
    )
    assert percent(PAGES[name]["policies"][0]["efficiency"]) in cards or len(PAGES[name]["policies"]) > 1
    assert len(cards) >= 4
    assert all(cards)
    heights = chromium.evaluate("[...document.querySelectorAll('svg')].map(e => e.getBoundingClientRect().height)")
    assert min(heights) >= 20


# Smallest font size of visible text, px.
_SMALLEST_TEXT = """
(() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let smallest = Infinity;
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    if (walker.currentNode.data.trim() && !parent.closest('svg') && parent.checkVisibility())
      smallest = Math.min(smallest, parseFloat(getComputedStyle(parent).fontSize));
  }
  return smallest;
})()
"""

# Visible elements that extend beyond the window, except those in a scrolling box.
_OUTSIDE = """
[...document.querySelectorAll('main *')]
  .filter(e => !e.closest('.scroll') && !e.closest('svg') && e.checkVisibility())
  .filter(e => e.getBoundingClientRect().right > innerWidth + 0.5 || e.getBoundingClientRect().left < -0.5)
  .map(e => e.outerHTML.slice(0, 120))
"""


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_stands_out_in_both_schemes(chromium, tmp_path, dark):
    """The page follows the reader's colour scheme, and normal and muted text have a contrast of at least 4.5 to 1."""
    path = tmp_path / "report.html"
    write_page(make_result(), path)
    chromium.open(path, width=1280, height=900, dark=dark)

    def luminance(selector, what):
        colour = chromium.evaluate(f"getComputedStyle(document.querySelector('{selector}')).{what}")
        channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    page, card = luminance("body", "backgroundColor"), luminance(".cards div", "backgroundColor")
    assert (page < 0.1) == dark
    for selector, behind in (("h1", page), ("figcaption", page), (".x span", page), (".cards dt", card)):
        bright, dim = sorted((luminance(selector, "color"), behind), reverse=True)
        assert (bright + 0.05) / (dim + 0.05) >= 4.5, selector
