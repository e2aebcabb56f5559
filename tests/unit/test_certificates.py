"""Certificates are looked at before anything starts."""

import shutil
import subprocess

import pytest
from certificates_made import Authority

from warmroot.cluster.config import WarmrootConfig
from warmroot.cluster.errors import ConfigError
from warmroot.deploy.certificates import check_certificates

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("certificates"))


def check(**keys: object) -> None:
    check_certificates(WarmrootConfig.of("x", **{name: str(value) for name, value in keys.items()}).tls)


def test_right_ones_pass(authority: Authority):
    certificate, key = authority.sign("server")
    check(ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=authority.file)
    both = authority.folder / "both.pem"
    both.write_text(certificate.read_text() + key.read_text())
    check(ssl_certfile=both)


def test_wrong_ones_are_named(authority: Authority):
    certificate, key = authority.sign("server")
    _, other = authority.sign("other")
    locked, missing = authority.folder / "locked.key", authority.folder / "missing.pem"
    subprocess.run(
        ["openssl", "ec", "-in", str(key), "-aes128", "-passout", "pass:x", "-out", str(locked)],
        check=True,
        capture_output=True,
    )
    for message, keys in {
        f"ssl_certfile: {missing}: No such file or directory": {"ssl_certfile": missing},
        f"ssl_keyfile: {other}: KEY_VALUES_MISMATCH": {"ssl_certfile": certificate, "ssl_keyfile": other},
        "ssl_keyfile: the private key has a passphrase; give one without": {
            "ssl_certfile": certificate,
            "ssl_keyfile": locked,
        },
        f"ssl_ca_certs: {key}: NO_CERTIFICATE_OR_CRL_FOUND": {
            "ssl_certfile": certificate,
            "ssl_keyfile": key,
            "ssl_ca_certs": key,
        },
    }.items():
        with pytest.raises(ConfigError) as caught:
            check(**keys)
        assert caught.value.message == message


def test_a_key_needs_its_certificate():
    with pytest.raises(ConfigError) as caught:
        WarmrootConfig.of("x", ssl_keyfile="k")
    assert caught.value.message == "ssl_certfile: is needed with ssl_keyfile and ssl_ca_certs"


def test_a_cluster_that_runs_already_cannot_be_given_any(authority: Authority):
    tls = WarmrootConfig.of("x", ssl_certfile=str(authority.file)).tls
    with pytest.raises(ConfigError, match="WARMROOT_SSL_CERTFILE"):
        check_certificates(tls, ray_address="auto")
