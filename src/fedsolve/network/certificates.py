"""The authority and the server's certificate: made, renewed, read and verified."""

from __future__ import annotations

import datetime
import inspect
import ipaddress
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from fedsolve import container
from fedsolve.errors import DataError, ModelFileError
from fedsolve.network.ciphers import ec, exceptions, hashes, oid, serialization, x509
from fedsolve.network.keyfolder import Keys, private_folder, write_new_private

AUTHORITY_DAYS = 3650
SERVER_DAYS = 398
WARN_DAYS = 30
ALWAYS = ("localhost", "127.0.0.1", "::1")
"""Hosts in every server certificate: for trials on the server machine itself."""

_BEGINNING = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_END = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)

_DNS = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
)

RENEW = "At the server: fedsolve keys renew, then start it again; sites need nothing."
NEW_AUTHORITY = "Begin anew: fedsolve keys init in another folder; send ca.crt to all sites."
ASK_FOR_AUTHORITY = "Ask the server's operator for the new ca.crt."


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


@dataclass(frozen=True)
class Validity:
    """Since when and until when a certificate is valid, and what renews it."""

    name: str
    until: datetime.datetime
    remedy: str
    since: datetime.datetime = _BEGINNING

    @classmethod
    def of(cls, certificate: x509.Certificate, name: str, remedy: str) -> Validity:
        return cls(name, certificate.not_valid_after_utc, remedy, certificate.not_valid_before_utc)

    @property
    def days(self) -> int:
        """Whole days that are left; negative once it has expired."""
        return (self.until - now()).days

    @property
    def announced(self) -> str | None:
        """What people should hear, from `WARN_DAYS` days before the end on."""
        if self.days >= WARN_DAYS:
            return None
        when = "has expired" if self.until <= now() else f"expires in {self.days} days"
        return f"{self.name} {when} ({self.until:%Y-%m-%d}). {self.remedy}"

    def check(self, path: Path) -> None:
        """Refuse the certificate in this file where it is not valid now."""
        if now() < self.since:
            raise ModelFileError(
                f"{path} is valid from {self.since:%Y-%m-%d %H:%M} UTC, but this machine's clock says "
                f"{now():%Y-%m-%d %H:%M}. Set the clock."
            )
        if now() > self.until:
            raise ModelFileError(f"{path} expired on {self.until:%Y-%m-%d}. {self.remedy}")


def of_server(keys: Keys) -> Validity:
    return Validity.of(load_certificate(keys.server_certificate), "the server's certificate", RENEW)


def of_authority(keys: Keys, remedy: str = NEW_AUTHORITY) -> Validity:
    return Validity.of(load_certificate(keys.authority), "the authority's certificate", remedy)


def create_authority(keys: Keys, hosts: Sequence[str], days: int = SERVER_DAYS) -> None:
    """Make the authority and the server's certificate for these host names and addresses."""
    for path in (keys.authority, keys.authority_key, keys.server_certificate, keys.server_key):
        if path.exists():
            raise ModelFileError(
                f"{path} exists: a new authority would lock out every site that has the old one. "
                "For a new server certificate use 'fedsolve keys renew'; for a new federation another folder."
            )
    names = _alternative_names(hosts)
    key, name, usage = new_key(), _subject("fedsolve certificate authority"), ("key_cert_sign", "crl_sign")
    certificate = _signed(name, name, key.public_key(), key, usage, authority=True, days=AUTHORITY_DAYS)
    private_folder(keys.folder)
    write_new_private(keys.authority_key, _private_pem(key))
    container.write_atomically(keys.authority, _pem(certificate))
    _issue(keys, names, days)


def renew_server(keys: Keys, hosts: Sequence[str] = (), days: int = SERVER_DAYS) -> None:
    """A new key and certificate for the server; without `hosts`, for the same hosts as before."""
    of_authority(keys).check(keys.authority)
    verify_pair(keys.authority, keys.authority_key, "Put back the right pair from a backup.")
    known = hosts or certificate_hosts(load_certificate(keys.server_certificate))
    _issue(keys, _alternative_names(known), days)


def _issue(keys: Keys, names: x509.SubjectAlternativeName, days: int) -> None:
    """The server's key and certificate, signed by the authority; an old pair is replaced."""
    authority, signer = load_certificate(keys.authority), load_key(keys.authority_key)
    key, subject = new_key(), _subject("fedsolve server")
    usage = x509.ExtendedKeyUsage([oid.ExtendedKeyUsageOID.SERVER_AUTH])
    more = names, usage, x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    parties = subject, authority.subject, key.public_key(), signer
    certificate = _signed(*parties, more=more, days=days, until=authority.not_valid_after_utc)
    container.write_atomically(keys.server_key, _private_pem(key), private=True)
    container.write_atomically(keys.server_certificate, _pem(certificate))


def site_certificate(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A certificate by which a site shows that it has its key, in PEM form with the key, as TLS wants it.

    The key is all it says: the server knows it from its list. It does not expire, and no clock need be right.
    """
    public, usage = key.public_key(), x509.ExtendedKeyUsage([oid.ExtendedKeyUsageOID.CLIENT_AUTH])
    made = _signed(_subject("fedsolve site"), _anchor_name(public), public, key, more=[usage])
    return _pem(made) + _private_pem(key)


def anchors(pems: Iterable[bytes]) -> str:
    """For each public key a certificate that makes TLS trust what this key has signed."""
    # What is trusted is the key inside; nobody looks at who signed it.
    signer, nobody, made = new_key(), _subject("fedsolve gate"), b""
    for pem in pems:
        public = cast("ec.EllipticCurvePublicKey", serialization.load_pem_public_key(pem))
        made += _pem(_signed(_anchor_name(public), nobody, public, signer, ["key_cert_sign"], authority=True))
    return made.decode()


def public_pem(certificate: bytes) -> bytes:
    """The public key of a certificate (DER), as lists of sites have it."""
    key = x509.load_der_x509_certificate(certificate).public_key()
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _anchor_name(key: ec.EllipticCurvePublicKey) -> x509.Name:
    """By what the certificates of a key are found: a digest of it."""
    return _subject(x509.SubjectKeyIdentifier.from_public_key(key).digest.hex())


def authority_fingerprint(keys: Keys) -> str:
    """SHA-256 of the authority's certificate in hexadecimal, to be compared by telephone."""
    return load_certificate(keys.authority).fingerprint(hashes.SHA256()).hex(":").upper()


def verify_pair(certificate: Path, key: Path, remedy: str) -> str:
    if load_certificate(certificate).public_key() != load_key(key).public_key():
        raise ModelFileError(f"{key} is not the key of {certificate}. {remedy}")
    return "key and certificate belong together"


def verify_chain(keys: Keys) -> str:
    try:
        load_certificate(keys.server_certificate).verify_directly_issued_by(load_certificate(keys.authority))
    except (ValueError, TypeError, exceptions.InvalidSignature) as problem:
        raise ModelFileError(
            f"{keys.server_certificate} was not signed by {keys.authority}, so no site would believe it. "
            "Make a new one: fedsolve keys renew"
        ) from problem
    return "the certificate is signed by the authority"


def certificate_hosts(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names]


def load_certificate(path: Path) -> x509.Certificate:
    _require(path)
    try:
        return x509.load_pem_x509_certificate(container.read(path))
    except ValueError as problem:
        raise ModelFileError(f"{path} is not a certificate in PEM form ({problem}).") from problem


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    _require(path)
    return elliptic(path, lambda data: serialization.load_pem_private_key(data, None))


def elliptic(path: Path, read: Callable[[bytes], object]) -> ec.EllipticCurvePrivateKey:
    """The elliptic-curve key that `read` finds in a file."""
    try:
        key = read(container.read(path))
    except (ValueError, TypeError, exceptions.UnsupportedAlgorithm) as problem:
        raise ModelFileError(f"{path} is not a private key without a password ({problem}).") from problem
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ModelFileError(f"{path} is not an elliptic-curve key. Make one with 'fedsolve keys'.")
    return key


def _require(path: Path) -> None:
    if path.exists():
        return
    remedy = "The server makes it with 'fedsolve keys init'."
    if path.name == "ca.crt":
        remedy = "At the server make it with 'fedsolve keys init'; at a site copy it from the operator."
    raise ModelFileError(f"{path} is missing. {remedy}")


def _alternative_names(hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys([*hosts, *ALWAYS]):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            if not _DNS.fullmatch(host) or re.fullmatch(r"[\d.]+", host):
                raise DataError(
                    f"{host!r} is neither a host name nor an address. Name the server as sites will: "
                    "--host fedsolve.hospital.example or --host 10.0.0.5, without a port."
                ) from None
            names.append(x509.DNSName(host))
    return x509.SubjectAlternativeName(names)


def _signed(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePrivateKey,
    usage: Collection[str] = ("digital_signature",),
    *,
    authority: bool = False,
    more: Iterable[x509.ExtensionType] = (),
    days: int | None = None,
    until: datetime.datetime = _END,
) -> x509.Certificate:
    """A certificate, valid from an hour ago so that a slow clock does not refuse a new one.

    usage: of those of X.509. days: None for one that is always valid; until: its end at the latest.
    """
    start, end, today = _BEGINNING, _END, now().replace(microsecond=0)
    if days is not None:
        start, end = today - datetime.timedelta(hours=1), today + datetime.timedelta(days=days)
    allowed = x509.KeyUsage(**{name: name in usage for name in inspect.signature(x509.KeyUsage).parameters})
    limits = x509.BasicConstraints(ca=authority, path_length=0 if authority else None)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(min(end, until))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(limits, critical=True)
        .add_extension(allowed, critical=True)
    )
    for extension in more:
        made = made.add_extension(extension, critical=False)
    return made.sign(signer, hashes.SHA256())


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(oid.NameOID.COMMON_NAME, name)])


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
