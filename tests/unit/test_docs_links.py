"""README and docs name things that are there: links, files, identifiers; their Python compiles."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w-]+(/[\w.-]+)*\.(py|md|svg|sh|toml)")
FOLDER = re.compile(r"[a-z_]+/([a-z_]+/)*")
IDENTIFIER = re.compile(r"[A-Z][a-z]+([A-Z][a-z]+)+|[A-Z]{2,}(_[A-Z]+)+")
OF_OTHERS = {"HF_TOKEN", "NewCluster", "OTEL_TRACES_SAMPLER", "OTEL_RESOURCE_ATTRIBUTES"}


def prose(path: Path) -> str:
    """A document without its code blocks."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def spans(path: Path, pattern: re.Pattern[str]) -> set[str]:
    """Inline code that is nothing but what ``pattern`` describes."""
    return {span for span in SPAN.findall(prose(path)) if pattern.fullmatch(span)}


def anchors(path: Path) -> set[str]:
    """Names of a document's headings, as web pages of the repository make them."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def words_of_the_code() -> frozenset[str]:
    sources = [path for path in ROOT.glob("*/**/*.py") if path.parts[len(ROOT.parts)] not in {".venv", "src", "build"}]
    return frozenset(word for path in sources for word in re.findall(r"\w+", path.read_text(encoding="utf-8")))


def test_there_are_documents():
    assert {path.name for path in DOCS} >= {"README.md", "architecture.md", "api.md", "configuration.md"}


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(path):
    broken = []
    for link in LINK.findall(prose(path)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_named_files_exist(path):
    named = spans(path, FILE) | spans(path, FOLDER)
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_named_identifiers_exist(path):
    assert spans(path, IDENTIFIER) - words_of_the_code() - OF_OTHERS == set()


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_python_compiles(path):
    for language, code in FENCE.findall(path.read_text(encoding="utf-8")):
        if language == "python":
            compile(code, path.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_fences_name_their_language(path):
    assert [code for language, code in FENCE.findall(path.read_text(encoding="utf-8")) if not language] == []


def test_every_module_of_the_main_rooms_is_listed_as_a_folder():
    folders = spans(ROOT / "docs" / "architecture.md", FOLDER)
    assert {"cluster/", "kv_store/", "router/", "actors/", "deploy/", "tests/"} <= folders
