"""Which weights a replica has, and that nothing cached by others is ever used with them."""

import zlib
from dataclasses import asdict, replace
from pathlib import Path

import msgpack
import pytest
from bus_contract import model_card, replica_info

from warmroot.actors.models.fingerprint import SAMPLE_BYTES, fingerprint
from warmroot.cluster.errors import ModelLoadError
from warmroot.cluster.messages import RankInfo, StartupNote
from warmroot.kv_store.announcements import info_from_wire, info_to_wire, unpack_card, unpack_note


def checkpoint(folder: Path, data: bytes, name: str = "model.safetensors") -> Path:
    folder.mkdir()
    (folder / name).write_bytes(data)
    (folder / "config.json").write_text("{}")
    return folder


def test_equal_files_have_one_fingerprint_wherever_they_lie(tmp_path: Path):
    weights = bytes(range(256)) * 4096
    first = fingerprint(checkpoint(tmp_path / "a", weights))
    assert first == fingerprint(checkpoint(tmp_path / "b", weights, "renamed.safetensors"))
    (tmp_path / "a" / "config.json").write_text('{"other": 1}')
    assert first == fingerprint(tmp_path / "a")
    assert first == fingerprint(tmp_path / "b" / "renamed.safetensors")


@pytest.mark.parametrize("place", [0, 500_000, 1_048_575])
def test_other_weights_have_another_one(tmp_path: Path, place: int):
    weights = bytearray(2**20)
    before = fingerprint(checkpoint(tmp_path / "a", bytes(weights)))
    weights[place] = 1
    assert fingerprint(checkpoint(tmp_path / "b", bytes(weights))) != before


def test_small_and_empty_files_have_one(tmp_path: Path):
    found = {fingerprint(checkpoint(tmp_path / str(size), bytes(size))) for size in (0, 1, SAMPLE_BYTES)}
    assert len(found) == 3


def test_a_checkpoint_that_is_gone_is_named(tmp_path: Path):
    with pytest.raises(ModelLoadError, match=r"gone\.gguf"):
        fingerprint(tmp_path / "gone.gguf")


def test_what_a_later_release_announces_is_understood():
    rank = RankInfo(rank=0, stage=0, host="h", pid=1, memory_bytes=1, last_step=1)
    info, card, note = replace(replica_info("a"), ranks=(rank,)), model_card(), StartupNote(stage="ready")
    wire = {**info_to_wire(info), "of_tomorrow": [1, 2]}
    wire["ranks"] = [{**rank, "also": "new"} for rank in wire["ranks"]]
    assert info_from_wire(wire) == info
    assert unpack_card(zlib.compress(msgpack.packb({**asdict(card), "of_tomorrow": 1}))) == card
    assert unpack_note(msgpack.packb({**asdict(note), "of_tomorrow": 1})) == note
