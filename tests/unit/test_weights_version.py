"""Which weights a replica has, and that nothing cached by others is ever used with them."""

import zlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import msgpack
import pytest
import torch
from bus_contract import model_card, replica_info
from safetensors.torch import save_file

from warmroot.actors.models.fingerprint import fingerprint
from warmroot.cluster.errors import ModelLoadError
from warmroot.cluster.messages import RankInfo, StartupNote
from warmroot.kv_store.announcements import info_from_wire, info_to_wire, unpack_card, unpack_note


def packed(value: object) -> bytes:
    return cast(bytes, msgpack.packb(value))


def checkpoint(folder: Path, changes: dict[str, tuple[int, float]] | None = None, name: str = "model") -> Path:
    """Two large tensors and a small one; ``changes``: a place in a tensor and what is put there."""
    tensors = {key: torch.arange(size, dtype=torch.float32) for key, size in (("a", 2**20), ("b", 100), ("c", 2**20))}
    for key, (place, value) in (changes or {}).items():
        tensors[key][place:] = value
    folder.mkdir()
    save_file(tensors, folder / f"{name}.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def test_equal_files_have_one_fingerprint_wherever_they_lie(tmp_path: Path):
    first = fingerprint(checkpoint(tmp_path / "a"))
    assert first == fingerprint(checkpoint(tmp_path / "b", name="renamed"))
    (tmp_path / "a" / "config.json").write_text('{"other": 1}')
    assert first == fingerprint(tmp_path / "a")
    assert first == fingerprint(tmp_path / "b" / "renamed.safetensors")


@pytest.mark.parametrize("changes", [{"a": (2**19, 1.0)}, {"b": (0, 1.0)}, {"b": (90, 1.0)}, {"c": (2**20 - 1, 1.0)}])
def test_other_weights_have_another_one(tmp_path: Path, changes: dict[str, tuple[int, float]]):
    assert fingerprint(checkpoint(tmp_path / "a")) != fingerprint(checkpoint(tmp_path / "b", changes))


@pytest.mark.parametrize("data", [b"", b"x" * 20, b"\x02" + bytes(7) + b"[]"])
def test_what_is_no_checkpoint_is_named(tmp_path: Path, data: bytes):
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        fingerprint(tmp_path)


def test_a_checkpoint_that_is_gone_is_named(tmp_path: Path):
    with pytest.raises(ModelLoadError, match=r"gone\.gguf"):
        fingerprint(tmp_path / "gone.gguf")


def test_what_a_later_release_announces_is_understood():
    rank = RankInfo(rank=0, stage=0, host="h", pid=1, memory_bytes=1, last_step=1)
    info, card, note = replace(replica_info("a"), ranks=(rank,)), model_card(), StartupNote(stage="ready")
    wire = {**info_to_wire(info), "of_tomorrow": [1, 2]}
    wire["ranks"] = [{**rank, "also": "new"} for rank in wire["ranks"]]
    assert info_from_wire(wire) == info
    assert unpack_card(zlib.compress(packed({**asdict(card), "of_tomorrow": 1}))) == card
    assert unpack_note(packed({**asdict(note), "of_tomorrow": 1})) == note
