"""Keys, certificates and the list of sites: what is made, who may read it, and what is refused."""

from __future__ import annotations

import datetime
import os
import ssl
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from fedsolve.errors import DataError, ModelFileError
from fedsolve.network import certificates, diagnosis, security
from fedsolve.network.keyfolder import Keys, site_name
from fedsolve.privacy.primitives import signer, verifier
from tests.command import document, fedsolve, refused

pytestmark = pytest.mark.network

HOSTS = ["fedsolve.hospital.example", "10.0.0.5"]

LINE = (
    "ecdsa-sha2-nistp256 "
    "AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYAAAAIbmlzdHAyNTYAAABBBGzWeRgPnhJEU6wnZx7ry+Car7J0doFjKTKW4q12g2P8Q6aw86Bp"
    "QqKhu01ILk+oDdbQha7RgiIWJ+dAdUY7WLg="
    " north"
)
FINGERPRINT = "SHA256:EW26LrvEAz/nZHZ63ZWDoLxXG4rXWuqMO6VrxdcwKSE"  # ssh-keygen -lf


@pytest.fixture
def held(tmp_path: Path) -> Keys:
    keys = Keys(tmp_path / "keys")
    certificates.create_authority(keys, HOSTS)
    return keys


def shake_hands(keys: Keys, host: str, authority: Path | None = None) -> str:
    """A TLS handshake in memory, by the strictest rules: the protocol version, or the error raised."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(keys.server_certificate, keys.server_key)
    client = ssl.create_default_context(cafile=str(authority or keys.authority))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(down, up, server_hostname=host), server.wrap_bio(up, down, server_side=True))
    for _ in range(10):
        done = 0
        for end in ends:
            try:
                end.do_handshake()
                done += 1
            except ssl.SSLWantReadError:
                pass
        if done == 2:
            return str(ends[0].version())
    raise AssertionError("the handshake did not end")


@pytest.mark.parametrize("host", [*HOSTS, "localhost", "127.0.0.1", "::1"])
def test_the_certificate_is_believed_for_its_hosts(held: Keys, host: str) -> None:
    assert shake_hands(held, host) == "TLSv1.3"


@pytest.mark.parametrize("host", ["hospital.example", "x.fedsolve.hospital.example", "10.0.0.6"])
def test_and_for_no_other(held: Keys, host: str) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for"):
        shake_hands(held, host)


def test_another_authority_does_not_vouch_for_it(held: Keys, tmp_path: Path) -> None:
    other = Keys(tmp_path / "other")
    certificates.create_authority(other, HOSTS)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(held, HOSTS[0], other.authority)


def test_a_site_keeps_a_roster_of_its_own(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("north", "south", "west")}
    public = {}
    for name, folder in folders.items():
        assert fedsolve("keys", "client", name, "--keys", folder).exit_code == 0
        public[name] = Keys(folder).client_public_key(name)
    north = Keys(folders["north"])
    with pytest.raises(ModelFileError, match=r"knows 0 other site.*fedsolve keys roster"):
        security.believed_keys(north, "north")
    told = document("keys", "roster", public["south"], public["west"], "--keys", north.folder)
    assert [site["site"] for site in told["sites"]] == ["south", "west"]
    assert told["sites"][0]["fingerprint"] == security.own_site(Keys(folders["south"]), "south").fingerprint
    assert sorted(security.believed_keys(north, "north")) == ["north", "south", "west"]
    # Another key under a known name is not taken, nor one for the site's own name.
    assert fedsolve("keys", "client", "south", "--keys", tmp_path / "thief").exit_code == 0
    stolen = Keys(tmp_path / "thief").client_public_key("south")
    found = fedsolve("keys", "roster", stolen, "--keys", north.folder)
    assert (found.exit_code, "roster --remove south" in " ".join(found.stderr.split())) == (2, True)
    document("keys", "roster", "--remove", "south", "--keys", north.folder)
    with pytest.raises(ModelFileError, match="knows 1 other site"):
        security.believed_keys(north, "north")
    assert fedsolve("keys", "client", "north", "--keys", tmp_path / "thief").exit_code == 0
    north.roster.add(Keys(tmp_path / "thief").client_public_key("north"))
    with pytest.raises(ModelFileError, match="has another key for 'north'"):
        security.believed_keys(north, "north")


def test_private_keys_are_for_their_owner_only(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    before = os.umask(0)
    try:
        certificates.create_authority(keys, HOSTS)
        security.create_client(keys, "north")
        certificates.renew_server(keys)
    finally:
        os.umask(before)
    for path in (keys.authority_key, keys.server_key, keys.client_key("north")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (keys.folder, keys.clients):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in keys.folder.iterdir() if path.name.startswith(".")] == []


def test_nothing_is_overwritten(held: Keys) -> None:
    security.create_client(held, "north")
    before = {path: path.read_bytes() for path in held.folder.rglob("*") if path.is_file()}
    with pytest.raises(ModelFileError, match="renew"):
        certificates.create_authority(held, HOSTS)
    with pytest.raises(ModelFileError, match="exists"):
        security.create_client(held, "north")
    assert before == {path: path.read_bytes() for path in held.folder.rglob("*") if path.is_file()}


def test_renewal_keeps_the_authority_and_the_hosts(held: Keys) -> None:
    authority, key = held.authority.read_bytes(), held.server_key.read_bytes()
    certificates.renew_server(held, days=10)
    certificate = certificates.load_certificate(held.server_certificate)
    assert held.authority.read_bytes() == authority
    assert held.server_key.read_bytes() != key
    assert set(certificates.certificate_hosts(certificate)) >= set(HOSTS)
    assert certificates.of_server(held).days == 9
    shake_hands(held, HOSTS[0])
    certificates.renew_server(held, ["new.example"])
    shake_hands(held, "new.example")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(held, HOSTS[0])


def test_a_certificate_does_not_outlive_its_authority(held: Keys) -> None:
    certificates.renew_server(held, days=certificates.AUTHORITY_DAYS + 1000)
    ends = [
        certificates.load_certificate(path).not_valid_after_utc
        for path in (held.server_certificate, held.authority)
    ]
    assert ends[0] <= ends[1]


@pytest.mark.parametrize(
    "host", ["", "a b", "host:9092", "https://host", "300.1.1.1", "-x", "a..b", "x" * 64]
)
def test_what_is_no_host_is_refused(tmp_path: Path, host: str) -> None:
    keys = Keys(tmp_path / "keys")
    with pytest.raises(DataError, match="neither a host name nor an address"):
        certificates.create_authority(keys, [host])
    assert not keys.folder.exists()


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", "a b", "-x", "x" * 64, "a\nb", "ü"])
def test_what_cannot_name_a_site_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="cannot name a site"):
        security.create_client(Keys(tmp_path / "keys"), name)
    assert not (tmp_path / "keys").exists()
    assert site_name("Clinic-7.b_2") == "Clinic-7.b_2"


def test_a_site_key_is_openssh(held: Keys) -> None:
    site = security.create_client(held, "north")
    key = serialization.load_ssh_private_key(held.client_key("north").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp256r1"
    assert security.own_site(held, "north") == site


def test_registration_by_public_key(held: Keys, tmp_path: Path) -> None:
    public = tmp_path / "north.pub"
    public.write_text(LINE + "\n")
    site = held.registered.add(public)
    assert (site.name, site.fingerprint) == ("north", FINGERPRINT)
    assert held.registered.add(public) == site
    assert held.registered.sites() == {"north": site}
    with pytest.raises(DataError, match="registered for the site 'north' already"):
        held.registered.add(public, "south")
    other = security.create_client(Keys(tmp_path / "other"), "north")
    with pytest.raises(DataError, match="with another key"):
        held.registered.add(Keys(tmp_path / "other").client_public_key("north"))
    renamed = held.registered.add(Keys(tmp_path / "other").client_public_key("north"), "clinic-7")
    assert renamed.pem == other.pem
    assert list(held.registered.sites()) == ["clinic-7", "north"]
    held.registered.remove("north")
    assert list(held.registered.sites()) == ["clinic-7"]
    with pytest.raises(DataError, match="clinic-7"):
        held.registered.remove("north")


def _public(key: object) -> str:
    encoded = key.public_key().public_bytes(  # type: ignore[attr-defined]
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return f"{encoded.decode()} north"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "nonsense",
        LINE.replace("AAAAE2Vj", "AAAAE2Vk"),
        LINE.replace(" north", " ../north"),
        LINE.replace(" north", " north pole"),
        _public(ec.generate_private_key(ec.SECP384R1())),
        _public(rsa.generate_private_key(65537, 2048)),
    ],
    ids=["empty", "nonsense", "damaged", "path", "two words", "P-384", "RSA"],
)
def test_what_is_no_site_key_is_not_registered(held: Keys, tmp_path: Path, content: str) -> None:
    path = tmp_path / "key.pub"
    path.write_text(content)
    with pytest.raises(DataError):
        held.registered.add(path)
    assert held.registered.sites() == {}


def test_a_private_key_is_not_registered(held: Keys) -> None:
    security.create_client(held, "north")
    with pytest.raises(DataError, match=r"NAME\.pub"):
        held.registered.add(held.client_key("north"))


def test_a_damaged_list_names_the_line(held: Keys) -> None:
    held.registered.path.write_text(f"# sites\n{LINE}\necdsa nonsense south\n")
    with pytest.raises(DataError, match="line 3"):
        held.registered.sites()


def test_the_server_starts_only_with_sound_keys(
    held: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="no site is registered"):
        diagnosis.verify(diagnosis.server_keys(held))
    held.registered.path.write_text(LINE)
    diagnosis.verify(diagnosis.server_keys(held))

    def shifted(days: int) -> None:
        clock = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
        monkeypatch.setattr(certificates, "now", lambda: clock)

    shifted(certificates.SERVER_DAYS + 1)
    with pytest.raises(ModelFileError, match=r"server\.pem expired .* keys renew"):
        diagnosis.verify(diagnosis.server_keys(held))
    shifted(certificates.AUTHORITY_DAYS + 1)
    with pytest.raises(ModelFileError, match=r"ca\.crt expired"):
        diagnosis.verify(diagnosis.server_keys(held))
    shifted(-1)
    with pytest.raises(ModelFileError, match="Set the clock"):
        diagnosis.verify(diagnosis.server_keys(held))
    monkeypatch.undo()

    held.server_key.chmod(0o640)
    with pytest.raises(ModelFileError, match="chmod 600"):
        diagnosis.verify(diagnosis.server_keys(held))
    held.server_key.chmod(0o600)

    other = Keys(tmp_path / "other")
    certificates.create_authority(other, HOSTS)
    mine, theirs = held.server_key.read_bytes(), other.server_key.read_bytes()
    held.server_key.write_bytes(theirs)
    with pytest.raises(ModelFileError, match="is not the key of"):
        diagnosis.verify(diagnosis.server_keys(held))
    held.server_key.write_bytes(mine)
    held.authority.write_bytes(other.authority.read_bytes())
    with pytest.raises(ModelFileError, match="was not signed by"):
        diagnosis.verify(diagnosis.server_keys(held))
    with pytest.raises(ModelFileError, match="is not the key of"):
        certificates.renew_server(held)
    held.server_certificate.write_text("damaged")
    with pytest.raises(ModelFileError, match="not a certificate"):
        diagnosis.verify(diagnosis.server_keys(held))
    held.server_certificate.unlink()
    with pytest.raises(ModelFileError, match=r"server\.pem is missing"):
        diagnosis.verify(diagnosis.server_keys(held))


def test_a_site_starts_only_with_sound_keys(held: Keys) -> None:
    with pytest.raises(ModelFileError, match="keys client north"):
        diagnosis.verify(diagnosis.site_keys(held, "north"))
    security.create_client(held, "north")
    diagnosis.verify(diagnosis.site_keys(held, "north"))
    held.client_key("north").chmod(0o644)
    with pytest.raises(ModelFileError, match="chmod 600"):
        diagnosis.verify(diagnosis.site_keys(held, "north"))
    held.client_key("north").write_text("damaged")
    with pytest.raises(ModelFileError, match="not a private key"):
        diagnosis.verify(diagnosis.site_keys(held, "north"))
    held.authority.unlink()
    with pytest.raises(ModelFileError, match=r"ca\.crt is missing"):
        diagnosis.verify(diagnosis.site_keys(held, "north"))


def test_the_command(tmp_path: Path) -> None:
    server, site = tmp_path / "server", tmp_path / "site"
    made = document("keys", "init", "--host", "h.example", "--keys", server)
    assert made["hosts"][0] == "h.example"
    assert document("keys", "list", "--keys", server)["sites"] == []
    told = document("keys", "client", "north", "--keys", site)
    registered = document("keys", "register", told["public_key"], "--keys", server)["registered"]
    assert registered == [{"site": "north", "fingerprint": told["fingerprint"]}]
    assert document("keys", "list", "--keys", server)["sites"] == registered
    (site / "ca.crt").write_bytes((server / "ca.crt").read_bytes())
    seen = document("keys", "list", "--keys", site)
    assert seen["authority_fingerprint"] == made["authority_fingerprint"]
    assert seen["keys"] == registered
    assert told["fingerprint"] in fedsolve("keys", "list", "--keys", site).stdout
    renewed = document("keys", "renew", "--host", "i.example", "--keys", server)
    assert renewed["hosts"][0] == "i.example"
    assert renewed["authority_fingerprint"] == made["authority_fingerprint"]
    assert document("keys", "remove", "north", "--keys", server)["removed"] == "north"
    for words in (("init", "--host", "h.example"), ("renew",), ("list",)):
        shown = fedsolve("keys", *words, "--keys", server if words[0] != "init" else tmp_path / "new")
        assert shown.exit_code == 0
        assert "valid until" in shown.stdout


def test_the_command_refuses(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    refused(fedsolve("keys", "init", "--keys", folder), 2, "--host")
    refused(fedsolve("keys", "init", "--host", "a b", "--keys", folder), 2, "'a b'")
    refused(fedsolve("keys", "list", "--keys", folder), 4, "missing")
    refused(fedsolve("keys", "client", "../x", "--keys", folder), 2, "cannot name")
    refused(fedsolve("keys", "register", tmp_path / "no.pub", "--keys", folder), 4, "no.pub")
    refused(fedsolve("keys", "remove", "north", "--keys", folder), 2, "nobody")
    assert fedsolve("keys", "init", "--host", "h.example", "--keys", folder).exit_code == 0
    refused(fedsolve("keys", "init", "--host", "h.example", "--keys", folder), 4, "exists")


def test_a_roster_is_read_again_when_it_changes(tmp_path: Path) -> None:
    """A site with a new key is believed, and the old key is not, without a restart of the others."""
    keys, told = Keys(tmp_path / "north"), list[str]()
    security.create_client(keys, "north")
    for name in ("south", "west"):
        security.create_client(Keys(tmp_path / name), name)
        keys.roster.add(Keys(tmp_path / name).client_public_key(name))
    old = signer(security.load_client_key(Keys(tmp_path / "west"), "west"))
    verify = verifier(security.latest_keys(keys, "north", told.append))
    assert verify("west", b"text", old(b"text"))
    security.create_client(Keys(tmp_path / "again"), "west")
    new = signer(security.load_client_key(Keys(tmp_path / "again"), "west"))
    assert not verify("west", b"text", new(b"text"))
    keys.roster.remove("west")  # the roster is too short for a moment: what was known stays
    assert verify("west", b"text", old(b"text"))
    assert "stays in force" in told[-1]
    keys.roster.add(Keys(tmp_path / "again").client_public_key("west"))
    assert verify("west", b"text", new(b"text"))
    assert not verify("west", b"text", old(b"text"))
    assert told[-1] == "the roster has changed: south, west"
