import subprocess
import sys
from array import array

import pytest

from warmroot.kv_store.hashing import block_hash, chain, namespace_root, pack_tokens, salted

PROGRAM = (
    "from warmroot.kv_store.hashing import *;"
    "print(chain(namespace_root('m', 'v1', salt='t'), list(range(32)), 16)[-1].hex())"
)


def test_known_values_do_not_drift():
    """Replicas of different versions share a bus: a change here must come with a new namespace."""
    root = namespace_root("m", "v1", salt="t")
    assert root.hex() == "10785c2a0e160e85fb71ab2b7b6c2a31"
    assert chain(root, list(range(32)), 16)[-1].hex() == "5dd59f8170725fc004cc720b68eaa2a1"


def test_equal_in_another_process_with_another_hash_seed():
    runs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True, text=True
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] == chain(namespace_root("m", "v1", salt="t"), list(range(32)), 16)[-1].hex()


def test_tokens_are_little_endian_int32():
    assert pack_tokens([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    with pytest.raises(OverflowError):
        pack_tokens([2**31])


def test_chain_hashes_whole_blocks_only_and_depends_on_all_before():
    root = namespace_root("m")
    assert chain(root, list(range(15)), 16) == []
    a, b = chain(root, list(range(33)), 16)
    assert b == block_hash(a, pack_tokens(range(16, 32))) and len(a) == len(b) == 16
    changed = chain(root, [99, *range(1, 33)], 16)
    assert changed[0] != a and changed[1] != b


def test_every_part_of_a_namespace_counts():
    fields = ("model", "weights_version", "adapter", "kv_format", "salt")
    roots = {namespace_root(**{"model": "m"} | {field: "x"}) for field in fields} | {namespace_root("m")}
    assert len(roots) == 6
    assert namespace_root("ab", "c") != namespace_root("a", "bc")


def test_a_tenant_is_salted_from_the_plain_root():
    root = namespace_root("m")
    assert salted(root, "") == root
    assert salted(root, "tenant") == namespace_root("m", salt="tenant") != root


@pytest.mark.parametrize("ids", [[], [0, 1, 2**31 - 1, -(2**31)], list(range(5000)), [True]])
def test_all_sequences_pack_alike(ids):
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    assert pack_tokens(ids) == pack_tokens(tuple(ids)) == pack_tokens(array("i", ids)) == packed.tobytes()


@pytest.mark.parametrize(
    ("ids", "error"),
    [([2**31], OverflowError), ([-(2**31) - 1], OverflowError), ([1.5], TypeError), ("ab", TypeError), (5, TypeError)],
)
def test_what_is_no_id_is_not_packed(ids, error):
    with pytest.raises(error):
        pack_tokens(ids)
