"""Nothing that comes from a file or the network is unpickled or evaluated."""

import ast
from collections.abc import Iterator
from pathlib import Path

import warmroot

ROOM = Path(warmroot.__file__).parent
ROOMS = ("cluster", "kv_store", "router", "actors", "deploy")
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
CALLS = {"eval", "exec", "__import__"}
ALLOWED = {
    # Between a process and its own children, over a socket pair that nobody else has.
    ("actors/parallel/spawn.py", "multiprocessing.connection"),
}


def findings(path: Path, name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                found = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module)):
                found = [module]
            case _:
                found = []
        for module in found:
            unsafe = module.split(".")[0] in MODULES or module.startswith("multiprocessing.")
            if unsafe and module != "multiprocessing.shared_memory" and (name, module) not in ALLOWED:
                yield f"{name}:{node.lineno}: {module}"
        if isinstance(node, ast.Call):
            yield from (f"{name}:{node.lineno}: {text}" for text in unsafe_calls(node))


def unsafe_calls(call: ast.Call) -> Iterator[str]:
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    text = ast.unparse(call.func)
    if text in CALLS:
        yield text
    if text == "torch.load" and keywords.get("weights_only") != "True":
        yield "torch.load without weights_only"
    if text.startswith("np.load") and keywords.get("allow_pickle") == "True":
        yield "np.load with pickle"
    if text in ("yaml.load", "yaml.unsafe_load", "yaml.full_load") and "Safe" not in keywords.get("Loader", ""):
        yield text


def test_nothing_is_unpickled_or_evaluated():
    found = [
        finding
        for room in ROOMS
        for path in sorted((ROOM / room).rglob("*.py"))
        for finding in findings(path, path.relative_to(ROOM).as_posix())
    ]
    assert found == []


def test_it_would_be_found(tmp_path: Path):
    path = tmp_path / "bad.py"
    path.write_text("import pickle\nfrom cloudpickle import loads\ntorch.load(x)\neval('1')\nyaml.load(x)\n")
    assert [finding.split(": ")[1] for finding in findings(path, "bad.py")] == [
        "pickle",
        "cloudpickle",
        "torch.load without weights_only",
        "eval",
        "yaml.load",
    ]
