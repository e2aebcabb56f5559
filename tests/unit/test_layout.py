"""The shape of the repository: links, sizes, and what an import brings along."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKS = ROOT / "src" / "warmroot"
PACKAGES = ("cluster", "kv_store", "router", "actors", "deploy")
LIBRARY = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_every_entry_of_src_is_a_link_to_something():
    entries = sorted(entry for entry in LINKS.iterdir() if entry.name != "__pycache__")
    assert [entry.name for entry in entries] == sorted(["__init__.py", "py.typed", *PACKAGES])
    for entry in entries:
        assert entry.is_symlink()
        assert entry.resolve() == ROOT / entry.name
        assert entry.exists()


def test_every_top_level_package_has_its_link():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages == set(PACKAGES)


def test_files_are_short():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in LIBRARY}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_functions_are_short():
    too_long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1}"
        for path in LIBRARY
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno - node.lineno >= 60
    ]
    assert too_long == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_with_modules_is_a_package(package):
    folders = {path.parent for path in (ROOT / package).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def imported_by(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after the statement."""
    code = f"{statement}; import sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize(
    "statement",
    ["import warmroot", "import warmroot.deploy.cli", "import warmroot.cluster.config, warmroot.cluster.capacity"],
)
def test_light_imports(statement):
    assert imported_by(statement) & {"torch", "ray", "transformers", "redis"} == set()


def test_the_command_line_starts_with_next_to_nothing():
    heavy = {"torch", "ray", "pydantic", "fastapi", "httpx", "rich", "yaml", "numpy"}
    assert imported_by("import warmroot.deploy.cli") & heavy == set()


def test_public_names_are_listed_and_unknown_ones_refused():
    import warmroot

    assert set(warmroot.__all__) <= set(dir(warmroot))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = warmroot.no_such_name
