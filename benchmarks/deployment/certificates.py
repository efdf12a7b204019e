"""Certificates and keys of a deployment: an authority of its own, the server's certificate, a key for each site."""

import ipaddress
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY = "fedmjp deployment authority"
AUTHORITY_DAYS, SERVER_DAYS = 3650, 825
BACKDATED = timedelta(hours=1)  # clocks of sites may be behind
INSIDE = ("localhost", "127.0.0.1")  # by which the programs on the server reach each other

Key = ec.EllipticCurvePrivateKey


def make_key() -> Key:
    """Draw a key on P-384."""
    return ec.generate_private_key(ec.SECP384R1())


def make_authority(key: Key) -> x509.Certificate:
    """Make the certificate of an authority, which signs no other authorities.

    Args:
        key: The authority's key.
    """
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, AUTHORITY)])
    usage = _usage(key_cert_sign=True, crl_sign=True)
    return (
        _certificate(name, name, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, SHA384())
    )


def make_server(key: Key, authority: x509.Certificate, authority_key: Key, host: str) -> x509.Certificate:
    """Sign the server's certificate, for the host that sites name and for programs on the server itself.

    Args:
        key: The server's key.
        authority: The authority's certificate.
        authority_key: The authority's key.
        host: Name or address by which sites reach the server.
    """
    names = [_general(name) for name in dict.fromkeys([host, *INSIDE])]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedmjp server")])
    return (
        _certificate(subject, authority.subject, key.public_key(), SERVER_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, SHA384())
    )


def pem(certificate: x509.Certificate) -> bytes:
    """Encode a certificate as PEM.

    Args:
        certificate: What to encode.
    """
    return certificate.public_bytes(Encoding.PEM)


def private_pem(key: Key) -> bytes:
    """Encode a key as PEM without encryption: programs read it when they start.

    Args:
        key: The private key.
    """
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def private_openssh(key: Key) -> bytes:
    """Encode a key in the form in which Flower loads a SuperNode's.

    Args:
        key: The private key.
    """
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


def public_openssh(key: Key) -> bytes:
    """Encode the public half of a key in the form in which Flower registers it.

    Args:
        key: The private key.
    """
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"


def _certificate(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + timedelta(days=days))
    )


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _usage(**allowed: bool) -> x509.KeyUsage:
    kinds = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
        "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**{kind: allowed.get(kind, False) for kind in kinds})
