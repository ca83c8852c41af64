"""Keys and certificates are read again while the server runs; what can't be used changes nothing."""

import logging
import ssl
from functools import partial

import pytest
import trustme

from kvq.errors import ConfigError
from kvq.server.admission.config import read_keys
from kvq.server.http.credentials import Access, Credentials, tls_context
from kvq.server.http.guard import Guard
from tests.server.http.test_guard import ask
from tests.server.http.test_listener import World


def write(path, *lines):
    path.write_text("\n".join(lines))
    path.chmod(0o600)
    return path


def test_a_key_for_metrics_reads_metrics_and_health_and_nothing_else():
    access = Access(api_keys=("a",), metrics_keys=("m", "n"))
    for key in access.metrics_keys:
        for path in ("/metrics", "/health", "/health/ready", "/health/deep", "/version"):
            assert ask(access, path=path, x_api_key=key)[::2] == (200, [("GET", "metrics")])
        for path in ("/v1/models", "/v1/completions", "/", "/pool", "/docs", "/openapi.json", "/tokenize"):
            status, _, seen = ask(access, path=path, authorization=f"Bearer {key}")
            assert (status, seen) == (403, []), path
    assert ask(access, path="/metrics", x_api_key="a")[2] == [("GET", "key-0")]
    assert ask(access, path="/metrics", x_api_key="x")[0] == 401
    assert ask(access, path="/health/live")[0] == 200


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metrics_keys": ("m",)}, "--metrics-key-file needs --api-key-file"),
        ({"metrics_keys": ("m",), "api_keys": ("a", "m")}, "allows everything"),
    ],
)
def test_metrics_keys_that_restrict_nothing_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        Access(**given)


def test_a_key_keeps_its_tenant_and_nobody_gets_that_of_another(tmp_path):
    """Whose cached prefixes and quotas it has."""
    file = write(tmp_path / "keys", "old", "stays")
    credentials = Credentials(Access(api_keys=read_keys(file)), read=lambda: Access(api_keys=read_keys(file)))

    def tenants(*keys):
        credentials.read_again()
        return [credentials.tenant(key.encode()) for key in keys]

    assert tenants("old", "stays", "new") == ["key-0", "key-1", None]
    write(file, "new", "old", "stays")
    assert tenants("old", "stays", "new") == ["key-0", "key-1", "key-2"]
    write(file, "new", "stays")
    assert tenants("old", "stays", "new") == [None, "key-1", "key-2"]
    write(file, "stays", "other")
    assert tenants("stays", "other") == ["key-1", "key-3"]
    write(file, "stays", "new")
    assert tenants("new") == ["key-4"]


def test_a_key_may_become_one_for_metrics_and_back():
    given = [Access(api_keys=("a",), metrics_keys=("b",)), Access(api_keys=("b",), metrics_keys=("a",))]
    credentials = Credentials(given[0], read=lambda: given[1])
    assert [credentials.tenant(key) for key in (b"a", b"b")] == ["key-0", "metrics"]
    credentials.read_again()
    assert [credentials.tenant(key) for key in (b"a", b"b")] == ["metrics", "key-1"]


def test_a_guard_goes_by_the_keys_of_now():
    given = [Access(api_keys=("a",)), Access(api_keys=("b",))]
    credentials = Credentials(given[0], read=lambda: given[1])
    guard = Guard(None, access=given[0], credentials=credentials)
    assert guard._tenant("/v1/models", {b"x-api-key": b"a"}) == "key-0"
    credentials.read_again()
    assert guard._tenant("/v1/models", {b"x-api-key": b"b"}) == "key-1"


@pytest.mark.parametrize(
    "damage", ["gone", "empty", "comments", "open to all", "not text", "both", "a folder"]
)
def test_a_file_of_keys_that_cannot_be_used_leaves_them_and_is_logged(tmp_path, caplog, damage):
    file, metrics = write(tmp_path / "keys", "a-secret"), write(tmp_path / "metrics", "m")

    def read():
        return Access(api_keys=read_keys(file), metrics_keys=read_keys(metrics))

    credentials = Credentials(read(), read=read)
    if damage in ("gone", "a folder"):
        file.unlink()
    if damage == "a folder":
        file.mkdir()
    if damage == "open to all":
        file.chmod(0o644)
    if damage == "not text":
        file.write_bytes(b"\xff\xfe")
    texts = {"empty": "", "comments": "# none\n", "both": "m\n"}
    if damage in texts:
        file.write_text(texts[damage])
    with caplog.at_level(logging.INFO, logger="kvq"):
        credentials.read_again()
    [record] = caplog.records
    assert (record.levelname, record.getMessage()[:37]) == ("ERROR", "keys and certificate stay as they wer")
    assert "a-secret" not in record.getMessage()
    assert [credentials.tenant(key) for key in (b"a-secret", b"m", b"x")] == ["key-0", "metrics", None]


class Certificates:
    """Files with what an authority issues, one after the other."""

    def __init__(self, folder):
        self.authority = trustme.CA()
        self.tls_files = folder / "cert.pem", folder / "key.pem"
        self.issue()

    def issue(self):
        issued = self.authority.issue_cert("localhost")
        issued.cert_chain_pems[0].write_to_path(str(self.tls_files[0]))
        issued.private_key_pem.write_to_path(str(self.tls_files[1]))
        self.tls_files[1].chmod(0o600)
        return ssl.PEM_cert_to_DER_cert(issued.cert_chain_pems[0].bytes().decode())

    @property
    def client(self):
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context


def test_handshakes_from_then_on_get_the_new_certificate_and_open_connections_live_on(tmp_path, caplog):
    files = Certificates(tmp_path)
    credentials = Credentials(Access(), partial(tls_context, *files.tls_files))
    with World(tls=lambda: credentials.context) as world:
        before = files.client.wrap_socket(world.connect(), server_hostname="localhost")
        wanted = files.issue()
        credentials.read_again()
        with files.client.wrap_socket(world.connect(), server_hostname="localhost") as after:
            assert after.getpeercert(binary_form=True) == wanted != before.getpeercert(binary_form=True)
        for damage in (
            lambda: files.tls_files[0].write_text("none"),
            lambda: files.tls_files[1].chmod(0o640),
        ):
            damage()
            with caplog.at_level(logging.ERROR, logger="kvq"):
                credentials.read_again()
            assert "stay as they were" in caplog.records[-1].getMessage()
            with files.client.wrap_socket(world.connect(), server_hostname="localhost") as after:
                assert after.getpeercert(binary_form=True) == wanted
            files.tls_files[1].chmod(0o600)
        before.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert before.recv(12) == b"HTTP/1.1 200"
        before.close()


def test_a_certificate_of_another_key_changes_nothing_not_even_the_keys(tmp_path):
    """All that is read together counts together."""
    files, given = Certificates(tmp_path), [Access(api_keys=("a",)), Access(api_keys=("b",))]
    credentials = Credentials(given[0], partial(tls_context, *files.tls_files), lambda: given[1])
    kept, old = credentials.context, files.tls_files[1].read_text()
    files.issue()
    files.tls_files[1].write_text(old)
    credentials.read_again()
    assert credentials.context is kept
    assert credentials.tenant(b"a") == "key-0"
