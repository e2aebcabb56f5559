"""Channels with TLS: who shows no certificate of the cluster's is neither heard nor believed."""

import asyncio
import shutil
from dataclasses import replace

import pytest
from certificates_made import Authority
from polling import until
from test_channel_sockets import TOKEN, Service, delta, request

from warmroot.cluster.config import WarmrootConfig
from warmroot.cluster.errors import ConfigError
from warmroot.cluster.messages import FinishReason
from warmroot.router.channel_client import ChannelClient
from warmroot.router.channel_server import ChannelServer
from warmroot.router.channel_tls import ChannelTls

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority.make(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    return Authority.make(tmp_path_factory.mktemp("theirs"))


def tls_of(authority, name="node", believes=None):
    return ChannelTls(*map(str, (*authority.sign(name), (believes or authority).file)))


@pytest.fixture
async def served(authority):
    service = Service()
    server = ChannelServer(service, TOKEN)
    tls = tls_of(authority, "replica")
    service.info = replace(service.info, address=await server.start("127.0.0.1", tls=tls))
    yield server, service
    await server.close()


async def is_admitted(service, tls):
    """Whether a client gets as far as the greeting."""
    client = ChannelClient(service.info, TOKEN, tls=tls)
    try:
        await asyncio.wait_for(client._serve_one_connection(), 1.0)
    except asyncio.TimeoutError:
        return True  # it lives on it
    except (OSError, Exception):
        return False
    raise AssertionError("a connection ended by itself")


async def test_a_stream_over_tls(served, authority):
    server, service = served
    client = ChannelClient(service.info, TOKEN, tls=tls_of(authority, "ingress"))
    client.start()
    await until(lambda: client.connected)
    stream = await client.submit(request())
    server.push([delta("r", 0)])
    server.push([delta("r", 1, FinishReason.LENGTH)])
    assert [d.token_ids async for d in stream] == [[100], [101]]
    (connection,) = server._connections
    assert connection._transport.get_extra_info("cipher")[1] == "TLSv1.3"
    assert connection._transport.get_extra_info("peercert")["subject"] == ((("commonName", "ingress"),),)
    await client.close()


async def test_strangers_are_not_heard(served, authority, stranger):
    _, service = served
    assert not await is_admitted(service, None)
    assert not await is_admitted(service, tls_of(stranger, believes=authority))
    assert not await is_admitted(service, tls_of(authority, believes=stranger))
    assert not service.submitted
    assert await is_admitted(service, tls_of(authority))


async def test_an_ingress_with_tls_does_not_speak_without(authority):
    service = Service()
    server = ChannelServer(service, TOKEN)
    service.info = replace(service.info, address=await server.start("127.0.0.1"))
    assert not await is_admitted(service, tls_of(authority))
    await server.close()


async def test_renewed_files_are_taken_up(authority, stranger, tmp_path):
    files = [tmp_path / name for name in ("cert", "key", "ca")]

    def put(source, names):
        for file, found in zip(files, (*source.sign(names), source.file), strict=True):
            shutil.copy(found, file)

    put(authority, "old")
    service = Service()
    server = ChannelServer(service, TOKEN)
    tls = ChannelTls(*map(str, files))
    service.info = replace(service.info, address=await server.start("127.0.0.1", tls=tls))
    assert not await is_admitted(service, tls_of(stranger))
    files[1].write_text("half written")
    tls.renew()
    assert await is_admitted(service, tls_of(authority))
    put(stranger, "new")
    tls.renew()
    assert await is_admitted(service, tls_of(stranger))
    await server.close()


def test_configuration():
    for keys, field in {
        ("channel_keyfile",): "channel_certfile",
        ("channel_ca_certs",): "channel_certfile",
        ("channel_certfile",): "channel_ca_certs",
    }.items():
        with pytest.raises(ConfigError, match=f"^{field}: is needed with"):
            WarmrootConfig.of("x", **dict.fromkeys(keys, "file"))
    assert WarmrootConfig.of("x").tls.channel == {}
    both = WarmrootConfig.of("x", channel_certfile="/c", channel_ca_certs="/a").tls.channel
    assert both == {"certfile": "/c", "keyfile": "/c", "ca_certs": "/a"}
