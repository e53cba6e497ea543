# SPDX-License-Identifier: Apache-2.0
"""A certificate authority for tests, as PEM files in a folder."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


class Authority:
    """An authority that signs certificates for servers and clients.

    Attributes:
        ca: its own certificate's file.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"authority {folder.name}")])
        self.ca = folder / "ca.pem"
        signed = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca.write_bytes(signed.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *hosts: str) -> tuple[Path, Path]:
        """Sign a certificate, for a server at these hosts and for a client; return its file and its key's."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        signed = (
            self._builder(subject, key.public_key())
            .add_extension(x509.SubjectAlternativeName([_general(host) for host in hosts or (name,)]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        files = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        files[0].write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        files[1].write_bytes(_pem(key))
        return files

    def server_options(self, *hosts: str, clients: bool = False) -> list[str]:
        """Return etcd's options for TLS, and for demanding a certificate of its clients."""
        certificate, key = self.issue("server", *hosts)
        demand = ["--client-cert-auth", "--trusted-ca-file", str(self.ca)] if clients else []
        return ["--cert-file", str(certificate), "--key-file", str(key), *demand]

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        today = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(today - datetime.timedelta(days=1))
            .not_valid_after(today + datetime.timedelta(days=2))
        )


def token_keys(folder: Path) -> tuple[Path, Path]:
    """Make a pair of RSA keys, as etcd signs its tokens with; return the public and the private key's file."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    files = folder / "token.pub", folder / "token.key"
    files[0].write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    files[1].write_bytes(_pem(key))
    return files


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
