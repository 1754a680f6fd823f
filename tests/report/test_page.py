"""The page: whole without anything else, honest about odd runs, and deaf to what hostile names and log lines say."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rigs.told_run import ToldRun

from everstep.core.summary import RunReport
from everstep.host import reporting
from everstep.report import markdown, page, pictures
from everstep.report.page import safe_link

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

EVIL = (
    "<script>document.title='owned'</script>",
    '"><img src=x onerror="document.title=\'owned\'">',
    "'><svg onload=document.title='owned'>",
    "</title></desc></svg></style></script><script>document.title='owned'</script>",
    "javascript:document.title='owned'",
    "{{ 7 * 191 }}{% for x in y %}",
    "| a | `b` [link](javascript:alert(1)) ![i](x) <b>\n# heading",
    "\x00\x1b[31m\u202e",
)


class Elements(HTMLParser):
    """What a page is made of: tags with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "line", "path", "circle", "polyline", "polygon"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()


def report_of(folder: Path, **fields) -> RunReport:
    return reporting.again(ToldRun(folder, **fields).write().persistent)


def hostile(folder: Path) -> Path:
    """A run that has something evil wherever text comes from outside."""
    evil = " ".join(EVIL)
    told = ToldRun(
        folder, name=evil, program=evil, cause=evil, quarantine_reason=evil, restarts=3, quarantined=(100, 300), status="failed",
        job={"config": {evil: evil}, "tracking": {"uri": f"javascript:alert(1)//{evil}"}},
    )  # fmt: skip
    run_dir = told.write().persistent
    told.event("gate.data", evil, ok=False, docs="javascript:document.title='owned'")
    told.event("promotion.refused", evil)
    told.event("tracking.away", evil)
    metrics = run_dir / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"accuracy"', '"' + EVIL[0] + '"'))
    return run_dir


def test_it_needs_nothing_but_itself(tmp_path):
    report_of(tmp_path, restarts=2)
    text = next(tmp_path.rglob("report.html")).read_text()
    elements = Elements(text)
    assert elements.open == [], "every element is closed"
    for tag, attributes in elements.found:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "base", "form")
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "srcset", "xlink:href")]
    assert "url(" not in text
    assert "@import" not in text
    assert text.startswith("<!doctype html>")
    assert len(text) < 200_000


def test_it_tells_its_story(tmp_path):
    report_of(tmp_path, restarts=3, quarantined=(300,), job={"price": {"per_gpu_hour": 2.5, "currency": "EUR"}})
    text = next(tmp_path.rglob("report.html")).read_text()
    plain = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))
    for words in (
        "Completed: step 900 of 900.",
        "3 restarts cost",
        "EUR",
        "rank 0 was killed by signal 9 → restart",
        "does not match its BLAKE3 digest",
        "NVIDIA H200",
        "python -m everstep.host.reporting",
        "GPU-hours",
        "every second is in one bucket",
    ):
        assert words in plain
    assert text.count('role="img"') == text.count("<desc") == 5, "each picture has words for those who do not see it"


def test_hostile_text_is_text(tmp_path):
    report = reporting.again(hostile(tmp_path))
    text = next(tmp_path.rglob("report.html")).read_text()
    elements = Elements(text)
    tags = {tag for tag, _ in elements.found}
    assert not tags & {"script", "img", "iframe", "object", "a"}
    assert "1337" not in text, "no template runs in it"
    assert not [1 for tag, attributes in elements.found if any(name.startswith("on") for name in attributes)]
    links = [attributes["href"] for tag, attributes in elements.found if "href" in attributes]
    assert links == []
    assert RunReport.model_validate_json(next(tmp_path.rglob("report.json")).read_bytes()) == report


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed; make test-setup brings it")
def test_a_browser_runs_nothing_in_it(tmp_path):
    reporting.again(hostile(tmp_path))
    file = next(tmp_path.rglob("report.html"))
    # without the page's own policy: the escaping alone must hold
    bare = tmp_path / "bare.html"
    bare.write_text(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", file.read_text()))
    for one in (file, bare):
        dom = browse(one, tmp_path)
        assert "owned" in dom, "what was said is shown"
        title = re.search(r"<title>(.*?)</title>", dom, re.DOTALL)
        assert title
        assert title[1] != "owned"
        assert "<section>" in dom
        assert "<script" not in dom


def browse(file: Path, folder: Path) -> str:
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom", f"--user-data-dir={folder / 'profile'}"]
    options += [
        "--disable-background-networking",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--virtual-time-budget=2000",
    ]
    done = subprocess.run([CHROMIUM, *options, file.as_uri()], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


@pytest.mark.parametrize(
    ("target", "link"),
    [
        ("https://host/x?y=1", True),
        ("http://host:5000", True),
        ("data-docs/index.html", True),
        ("javascript:alert(1)", False),
        ("JaVaScRiPt:alert(1)", False),
        (" javascript:alert(1)", False),
        ("java\nscript:alert(1)", False),
        ("data:text/html,<script>", False),
        ("file:///etc/passwd", False),
        ("//evil.example/x", False),
        ("/etc/passwd", False),
        ("../../x", False),
        ("https://", False),
        ("http://[", False),
        ("", False),
    ],
)
def test_links_lead_to_the_web_or_to_a_file_beside(target, link):
    assert safe_link(target) == (target if link else "")


@pytest.mark.parametrize("evil", EVIL)
def test_markdown_of_hostile_text_holds_no_structure(evil):
    text = markdown.text(evil)
    assert not re.search(r"[<>|`\[\]*#!\n\r{}\"\\]", text.replace("&#", ""))
    assert ":" not in text


def test_the_markdown_is_whole(tmp_path):
    reporting.again(hostile(tmp_path))
    report = RunReport.model_validate_json(next(tmp_path.rglob("report.json")).read_bytes())
    lines = markdown.render(report).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in rows} == {4, 5, 7}
    assert not [line for line in lines if "<script" in line.lower() and not in_code(lines, line)]
    assert "](" not in "\n".join(line for line in lines if not in_code(lines, line))


def in_code(lines: list[str], line: str) -> bool:
    return sum(1 for one in lines[: lines.index(line)] if one.startswith("```")) % 2 == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"steps": 40, "every": 1000, "evaluate_every": 0},
        {"steps": 1, "every": 1000, "evaluate_every": 0, "status": None},
        {"steps": 2000, "every": 10, "restarts": 200},
        {"steps": 300, "step_seconds": 6048.0, "every": 10, "restarts": 2},
        {"steps": 60, "every": 10, "quarantined": tuple(range(10, 61, 10))},
        {"steps": 50, "loss": lambda _: float("nan")},
        {"steps": 50, "loss": lambda step: float("inf") if step > 20 else -1.0},
        {"steps": 50, "loss": lambda step: 10.0 ** (step - 40)},
    ],
    ids=[
        "no-checkpoint",
        "killed-at-once",
        "200-restarts",
        "3-weeks",
        "all-quarantined",
        "only-nan",
        "inf",
        "explodes",
    ],
)
def test_odd_runs_have_a_sound_page(tmp_path, fields):
    report = report_of(tmp_path, **fields)
    text = next(tmp_path.rglob("report.html")).read_text()
    assert Elements(text).open == []
    assert sum(report.time.buckets.values()) == pytest.approx(report.time.wall)
    for picture in filter(None, (pictures.loss(report), pictures.speed(report), pictures.checkpoints(report))):
        for shape in picture.shapes:
            assert not [value for value in shape.attributes.values() if re.search(r"\b(nan|inf)\b", value)]


def test_what_there_is_too_much_of_is_folded_and_counted(tmp_path):
    report_of(tmp_path, steps=2000, every=10, restarts=200)
    text = next(tmp_path.rglob("report.html")).read_text()
    assert "189 earlier attempts" in text
    assert "each stroke: one of 200 restarts" in text


def test_a_command_with_a_hostile_path_is_one_argument(tmp_path):
    import shlex

    report = report_of(tmp_path).model_copy(update={"places": {"run directory": "/x; rm -rf ~/ $(id)`id`'"}})
    (command,) = [one for what, one in page.go_on(report) if "page again" in what]
    assert shlex.split(command)[3:] == ["/x; rm -rf ~/ $(id)`id`'"]


def test_the_fields_of_the_record_are_documented():
    text = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(RunReport.model_fields)
