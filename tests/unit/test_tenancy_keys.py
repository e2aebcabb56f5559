"""API keys: the file that holds their hashes, the ring that finds them, and the store that follows the file."""

import asyncio
import hashlib
import os
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manual_clock import ManualClock

from warmroot.cluster.errors import ConfigError
from warmroot.router.tenancy.key_edit import read_text, replace_text, with_key, without_key
from warmroot.router.tenancy.key_file import parse_key_file
from warmroot.router.tenancy.key_ring import HeldKey, KeyRing, digest_of, hash_text
from warmroot.router.tenancy.key_store import KeyStore
from warmroot.router.tenancy.principal import Principal

ALICE, BOB = "sk-alice-0123456789abcdef", "sk-bob-0123456789abcdef"
FULL = f"""\
# Who may ask.
keys:
  - name: alice
    tenant: acme
    hash: {hash_text(ALICE)}
    models: [smollm2, other]
    max_priority: 3
    share: 2
    requests_per_minute: 60
    tokens_per_minute: 1000
    expires: 2027-01-01
    cache_group: friends
  # Bob looks after the machines.
  - name: bob
    hash: {hash_text(BOB)}
    admin: true

tenants:
  acme:
    tokens_per_minute: 5000
"""
NEW_YEAR_2027 = 1_798_761_600.0


def test_a_hash_is_plain_sha256():
    assert hash_text("abc") == "sha256:" + hashlib.sha256(b"abc").hexdigest()


def test_a_file_with_everything():
    ring = parse_key_file(FULL, "keys.yaml").ring()
    assert ring.find(ALICE, 0.0) == Principal(
        tenant="acme",
        name="alice",
        models=frozenset({"smollm2", "other"}),
        max_priority=3,
        share=2.0,
        requests_per_minute=60,
        tokens_per_minute=1000,
        cache_group="friends",
        tenant_tokens_per_minute=5000,
    )
    assert ring.find(BOB, 0.0) == Principal(name="bob", is_admin=True)
    for wrong in ("", ALICE[:-1], ALICE + "x", hash_text(ALICE), "\udc80"):
        assert ring.find(wrong, 0.0) is None


@pytest.mark.parametrize("expires", ["2027-01-01", "'2027-01-01'", "2027-01-01T00:00:00Z", "2027-01-01 01:00:00+01:00"])
def test_a_key_expires_on_the_second(expires):
    ring = parse_key_file(FULL.replace("2027-01-01", expires), "keys.yaml").ring()
    assert ring.find(ALICE, NEW_YEAR_2027 - 0.001) is not None
    assert ring.find(ALICE, NEW_YEAR_2027) is None


def test_a_disabled_key_opens_nothing():
    text = FULL.replace("    admin: true", "    disabled: true")
    assert parse_key_file(text, "keys.yaml").ring().find(BOB, 0.0) is None


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "keys:\n", "keys: []\ntenants:\n"])
def test_a_file_without_keys(text):
    assert len(parse_key_file(text, "keys.yaml").ring()) == 0


HASH, OTHER = hash_text(ALICE), hash_text(BOB)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys: 5", "k:1: keys: should be a valid list"),
        ("- name: x", "k:1: should be a valid dictionary"),
        ("keys:\n- name: a\n", "k:2: hash: Field required"),
        (f"keys:\n- name: a\n  hash: {HASH}\n  tenent: x\n", "k:4: tenent: unknown field"),
        (f"keys:\n- name: a\n  hash: {ALICE}\n", "k:3: hash: must be sha256: and 64"),
        (f"keys:\n- name: a\n  hash: {HASH.upper()}\n", "k:3: hash: must be sha256: and 64"),
        (f"keys:\n- name: a b\n  hash: {HASH}\n", "k:2: name: String should match"),
        (f"keys:\n- name: a\n  hash: {HASH}\n  share: 0\n", "k:4: share: should be greater than 0"),
        (
            f"keys:\n- name: a\n  hash: {HASH}\n  requests_per_minute: '5'\n",
            "k:4: requests_per_minute: should be a valid",
        ),
        (f"keys:\n- name: a\n  hash: {HASH}\n  models: smollm2\n", "k:4: models: should be a valid list"),
        (f"keys:\n- name: a\n  hash: {HASH}\n  expires: soon\n", "k:4: expires: is not valid"),
        (f"keys:\n- name: a\n  hash: {HASH}\n  name: b\n", "k:4: name: stands here twice"),
        (f"keys:\n- name: a\n  hash: {HASH}\n- name: b\n  hash: {HASH}\n", "k:5: hash: is the same as in line 3"),
        (
            f"keys:\n- name: a\n  hash: {HASH}\n- name: a\n  hash: {hash_text(BOB)}\n",
            "k:4: name: is the same as in line 2",
        ),
        ("keys: [\n", "k:2: not valid YAML"),
        ("keys: {a: *b}\n", "k:1: not valid YAML"),
        ("keys: &a [*a]\n", "k: nested too deeply"),
        ("tenants: {a: {tokens_per_minute: 0}}", "k:1: tokens_per_minute: should be greater than or equal to 1"),
    ],
)
def test_a_wrong_file_is_refused_by_line_and_field(text, message):
    with pytest.raises(ConfigError, match="^" + re.escape(message)) as caught:
        parse_key_file(text, "k")
    assert ALICE not in str(caught.value)


def _steps(ring: KeyRing, key: str) -> Counter[str]:
    """Every line and call of our own code while a key is looked up."""
    seen: Counter[str] = Counter()

    def trace(frame, event, arg):
        seen[f"{frame.f_code.co_filename}:{frame.f_lineno}:{event}"] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        ring.find(key, 0.0)
    finally:
        sys.settrace(before)
    return seen


def test_no_early_exit_depends_on_a_key():
    """A wrong key takes the same steps however much of it is right, and nothing is compared but whole digests."""
    ring = KeyRing({digest_of(key): HeldKey(Principal(name=key)) for key in (ALICE, BOB)})
    wrong = [ALICE[:cut] + "#" * (len(ALICE) - cut) for cut in range(len(ALICE))]
    traces = [_steps(ring, key) for key in wrong]
    assert all(trace == traces[0] for trace in traces)
    assert _steps(ring, ALICE) == _steps(ring, BOB)
    assert len({digest_of(key)[:4] for key in wrong}) == len(wrong)  # where digests part says nothing of the keys


def store(path: Path, fixed: KeyRing | None = None):
    clock = ManualClock()
    return KeyStore(fixed or KeyRing({}), path, clock=lambda: 0.0, monotonic=clock), clock


def entry(name: str, key: str) -> str:
    return f"- name: {name}\n  hash: {hash_text(key)}\n"


async def test_a_changed_file_is_read_again(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text("keys:\n" + entry("alice", ALICE))
    keys, clock = store(path)
    assert (await keys.find(ALICE)).name == "alice"
    path.write_text("keys:\n" + entry("robert", BOB))
    assert (await keys.find(ALICE)).name == "alice"  # not looked at yet
    clock.now += 1.0
    assert await keys.find(ALICE) is None
    assert (await keys.find(BOB)).name == "robert"


async def test_nobody_slips_in_while_the_file_is_read(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text("keys:\n" + entry("alice", ALICE))
    keys, clock = store(path)
    path.write_text("keys: []\n")
    clock.now += 1.0
    assert await asyncio.gather(*(keys.find(ALICE) for _ in range(20))) == [None] * 20


async def test_a_secret_of_kubernetes_is_swapped_by_a_link(tmp_path):
    """The file is a link to ``..data/keys.yaml``, and ``..data`` a link that is replaced."""
    for version, (name, key) in enumerate((("alice", ALICE), ("bob", BOB))):
        (tmp_path / f"..{version}").mkdir()
        file = tmp_path / f"..{version}" / "keys.yaml"
        file.write_text("keys:\n" + entry(name, key))
        os.utime(file, (1, 1))
    (tmp_path / "..data").symlink_to("..0")
    (tmp_path / "keys.yaml").symlink_to("..data/keys.yaml")
    keys, clock = store(tmp_path / "keys.yaml")
    assert (await keys.find(ALICE)).name == "alice"
    (tmp_path / "..next").symlink_to("..1")
    os.replace(tmp_path / "..next", tmp_path / "..data")
    clock.now += 1.0
    assert (await keys.find(BOB)).name == "bob"
    assert await keys.find(ALICE) is None


async def test_a_broken_file_changes_nothing_and_says_so(tmp_path, caplog):
    path = tmp_path / "keys.yaml"
    path.write_text("keys:\n" + entry("alice", ALICE))
    keys, clock = store(path)
    for number, ruin in enumerate((lambda: path.write_text("keys: ["), path.unlink, lambda: path.write_bytes(b"\xff"))):
        ruin()
        clock.now += 1.0
        assert (await keys.find(ALICE)).name == "alice"
        assert keys.num_faults == number + 1
        assert str(path) in keys.fault
        clock.now += 1.0
        await keys.find(ALICE)
        assert keys.num_faults == number + 1  # once for each change
    assert caplog.text.count("API keys stay as they were") == 3
    path.write_text("keys:\n" + entry("bob", BOB))
    clock.now += 1.0
    assert (await keys.find(BOB)).name == "bob"
    assert (keys.fault, await keys.find(ALICE)) == ("", None)


async def test_a_file_that_is_broken_at_first_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        store(tmp_path / "missing.yaml")


async def test_keys_of_flags_stay_and_win(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text("keys:\n" + entry("alice", ALICE))
    fixed = KeyRing({digest_of(ALICE): HeldKey(Principal(name="flag"))})
    keys, clock = store(path, fixed)
    assert (await keys.find(ALICE)).name == "flag"
    path.write_text("keys: []")
    clock.now += 1.0
    assert (await keys.find(ALICE)).name == "flag"
    assert not keys.is_open


def test_editing_keeps_what_else_stands_there():
    more = with_key(FULL, {"name": "carol", "hash": hash_text("sk-carol")}, "k")
    assert more.startswith("# Who may ask.\nkeys:\n  - name: alice\n")
    assert "    admin: true\n  - name: carol\n    hash: sha256:" in more
    assert more.endswith("\ntenants:\n  acme:\n    tokens_per_minute: 5000\n")
    assert without_key(more, "carol", "k") == FULL
    fewer = without_key(FULL, "alice", "k")
    assert fewer.startswith("# Who may ask.\nkeys:\n  # Bob looks after the machines.\n  - name: bob\n")
    assert [key.name for key in parse_key_file(without_key(fewer, "bob", "k"), "k").keys] == []


@pytest.mark.parametrize("text", ["", "# mine\n", "keys:\n", "keys: []\n", "keys: []", "tenants: {a: {}}\n"])
def test_a_first_key(text):
    changed = with_key(text, {"name": "a", "hash": HASH}, "k")
    assert [key.name for key in parse_key_file(changed, "k").keys] == ["a"]


def test_what_cannot_be_edited_is_left_alone():
    one_line = f"keys: [{{name: a, hash: '{HASH}'}}]\n"
    with pytest.raises(ConfigError, match="k:1: keys: write one entry to a line"):
        with_key(one_line, {"name": "b", "hash": hash_text(BOB)}, "k")
    with pytest.raises(ConfigError, match="has no key 'nobody'"):
        without_key(FULL, "nobody", "k")
    with pytest.raises(ConfigError, match="is the same as in line"):
        with_key(FULL, {"name": "bob", "hash": hash_text("sk-other")}, "k")


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abcdef")), max_size=20), st.sampled_from(["", "  ", "    "]))
def test_any_row_of_edits_leaves_the_keys_that_it_should(edits, indent):
    text, names = (
        f"# top\nkeys:\n{indent}- name: z\n{indent}  hash: {hash_text('z')}\n\n# below\ntenants: {{}}\n",
        ["z"],
    )
    for adds, name in edits:
        if adds and name not in names:
            text = with_key(text, {"name": name, "hash": hash_text(name), "models": ["m"]}, "k")
            names.append(name)
        elif not adds and name in names:
            text = without_key(text, name, "k")
            names.remove(name)
    assert [key.name for key in parse_key_file(text, "k").keys] == names
    assert text.startswith("# top\nkeys:")
    assert "# below\ntenants: {}\n" in text


def test_a_file_is_replaced_whole_and_private(tmp_path):
    path, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
    link.symlink_to(path)
    assert read_text(link) == ""
    replace_text(link, FULL)
    assert (path.read_text(), read_text(link), path.stat().st_mode & 0o777) == (FULL, FULL, 0o600)
    assert sorted(os.listdir(tmp_path)) == ["link.yaml", "real.yaml"]
    with pytest.raises(ConfigError, match="No such file"):
        replace_text(tmp_path / "missing" / "keys.yaml", FULL)
