"""The authority and the server's certificate: made, renewed, read and verified."""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsolve import container
from fedsolve.errors import DataError, ModelFileError
from fedsolve.network.keyfolder import Keys, private_folder, write_private

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

AUTHORITY_DAYS = 3650
SERVER_DAYS = 398
WARN_DAYS = 30
ALWAYS = ("localhost", "127.0.0.1", "::1")
"""Hosts in every server certificate: for trials on the server machine itself."""

_DNS = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
)


def now() -> datetime.datetime:
    """The time by this machine's clock."""
    return datetime.datetime.now(datetime.UTC)


def days_left(certificate: x509.Certificate) -> int:
    """Whole days until the certificate expires."""
    return (certificate.not_valid_after_utc - now()).days


def create_authority(keys: Keys, hosts: Sequence[str], days: int = SERVER_DAYS) -> None:
    """Make the authority and the server's certificate for these host names and addresses."""
    from cryptography import x509

    for path in (keys.authority, keys.authority_key, keys.server_certificate, keys.server_key):
        if path.exists():
            raise ModelFileError(
                f"{path} exists: a new authority would lock out every site that has the old one. "
                "For a new server certificate use 'fedsolve keys renew'; for a new federation another folder."
            )
    names = _alternative_names(hosts)
    key = new_key()
    name = _subject("fedsolve certificate authority")
    unlimited = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
    )
    certificate = (
        _certificate(name, name, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=False,
                key_cert_sign=True,
                crl_sign=True,
                encipher_only=False,
                decipher_only=False,
                **unlimited,
            ),
            critical=True,
        )
        .sign(key, _sha384())
    )
    private_folder(keys.folder)
    write_private(keys.authority_key, _private_pem(key))
    container.write_atomically(keys.authority, _pem(certificate))
    _issue(keys, names, days)


def renew_server(keys: Keys, hosts: Sequence[str] = (), days: int = SERVER_DAYS) -> None:
    """A new key and certificate for the server; without `hosts`, for the same hosts as before.

    Sites need nothing new: they trust the authority, which stays.
    """
    verify_authority(keys)
    known = hosts or certificate_hosts(load_certificate(keys.server_certificate))
    _issue(keys, _alternative_names(known), days)


def _issue(keys: Keys, names: x509.SubjectAlternativeName, days: int) -> None:
    """The server's key and certificate, signed by the authority; an old pair is replaced."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    authority, signer = load_certificate(keys.authority), load_key(keys.authority_key)
    key = new_key()
    off = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "key_cert_sign",
            "crl_sign",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    certificate = (
        _certificate(_subject("fedsolve server"), authority.subject, key.public_key(), days, authority)
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=True, **off), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False)
        .sign(signer, _sha384())
    )
    write_private(keys.server_key, _private_pem(key), replace=True)
    container.write_atomically(keys.server_certificate, _pem(certificate))


def authority_fingerprint(keys: Keys) -> str:
    """SHA-256 of the authority's certificate in hexadecimal, to be compared by telephone."""
    digest = load_certificate(keys.authority).fingerprint(_sha256()).hex().upper()
    return ":".join(digest[start : start + 2] for start in range(0, len(digest), 2))


def verify_authority(keys: Keys) -> None:
    """Raise if the authority cannot sign: files, dates, key and certificate belonging together."""
    certificate, key = load_certificate(keys.authority), load_key(keys.authority_key)
    verify_dates(keys.authority, certificate, "Begin anew with 'fedsolve keys init' and send ca.crt to all.")
    if certificate.public_key() != key.public_key():
        raise ModelFileError(
            f"{keys.authority_key} is not the key of {keys.authority}. Put back the right pair from a backup."
        )


def verify_pair(keys: Keys) -> None:
    """Raise unless the server's key is the one in its certificate."""
    if load_certificate(keys.server_certificate).public_key() != load_key(keys.server_key).public_key():
        raise ModelFileError(
            f"{keys.server_key} is not the key of {keys.server_certificate}. "
            "Make a new pair: fedsolve keys renew"
        )


def verify_chain(keys: Keys) -> None:
    """Raise unless the authority signed the server's certificate."""
    from cryptography.exceptions import InvalidSignature

    try:
        load_certificate(keys.server_certificate).verify_directly_issued_by(load_certificate(keys.authority))
    except (ValueError, TypeError, InvalidSignature) as problem:
        raise ModelFileError(
            f"{keys.server_certificate} was not signed by {keys.authority}, so no site would believe it. "
            "Make a new one: fedsolve keys renew"
        ) from problem


def verify_dates(path: Path, certificate: x509.Certificate, remedy: str) -> None:
    """Raise unless the certificate is valid today."""
    today = now()
    if today < certificate.not_valid_before_utc:
        raise ModelFileError(
            f"{path} is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC, but this machine's "
            f"clock says {today:%Y-%m-%d %H:%M}. Set the clock."
        )
    if today > certificate.not_valid_after_utc:
        raise ModelFileError(f"{path} expired on {certificate.not_valid_after_utc:%Y-%m-%d}. {remedy}")


def certificate_hosts(certificate: x509.Certificate) -> list[str]:
    """The host names and addresses a server certificate is for."""
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = names.get_values_for_type(x509.IPAddress)
    return [*names.get_values_for_type(x509.DNSName), *map(str, addresses)]


def load_certificate(path: Path) -> x509.Certificate:
    """The certificate in a PEM file."""
    from cryptography import x509

    _demand(path)
    try:
        return x509.load_pem_x509_certificate(container.read(path))
    except ValueError as problem:
        raise ModelFileError(f"{path} is not a certificate in PEM form ({problem}).") from problem


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The private key in a PEM file."""
    from cryptography.hazmat.primitives import serialization

    _demand(path)
    return elliptic(path, lambda data: serialization.load_pem_private_key(data, None))


def elliptic(path: Path, read: Callable[[bytes], object]) -> ec.EllipticCurvePrivateKey:
    """The elliptic-curve key that `read` finds in a file."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = read(container.read(path))
    except (ValueError, TypeError, UnsupportedAlgorithm) as problem:
        raise ModelFileError(f"{path} is not a private key without a password ({problem}).") from problem
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ModelFileError(f"{path} is not an elliptic-curve key. Make one with 'fedsolve keys'.")
    return key


def _demand(path: Path) -> None:
    if path.exists():
        return
    if path.name == "ca.crt":
        remedy = (
            "At the server make it with 'fedsolve keys init'; at a site copy it from the server's operator."
        )
    else:
        remedy = "The server makes it with 'fedsolve keys init'."
    raise ModelFileError(f"{path} is missing. {remedy}")


def _alternative_names(hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    from cryptography import x509

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


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    days: int,
    within: x509.Certificate | None = None,
) -> x509.CertificateBuilder:
    """A certificate to be signed, valid from an hour ago so that a slow clock does not refuse a new one."""
    from cryptography import x509

    today = now().replace(microsecond=0)
    end = today + datetime.timedelta(days=days)
    if within is not None:
        end = min(end, within.not_valid_after_utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(hours=1))
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _subject(name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def new_key() -> ec.EllipticCurvePrivateKey:
    """A new private key on P-384."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _sha256() -> Any:
    from cryptography.hazmat.primitives import hashes

    return hashes.SHA256()


def _sha384() -> Any:
    from cryptography.hazmat.primitives import hashes

    return hashes.SHA384()


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
