"""Signed provenance: images that C2PA's own reader checks; certificates that do not sign."""

import csv
import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from c2pa import Reader
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from semix.data.errors import InputError
from semix.data.images import ENCODINGS, decode_image, encode_image
from semix.data.marks import SOURCE_TYPE, is_marked
from semix.data.signing import MEDIA_TYPES, ImageSigner
from tests.command import semix
from tests.handmade import make_root, pixels

PEM, NOW = serialization.Encoding.PEM, datetime.now(UTC)
P256 = ec.SECP256R1()


def certificate(subject, issuer, key, signer, *, days=30, use=ExtendedKeyUsageOID.EMAIL_PROTECTION):
    """A certificate of C2PA's profile; that of an authority where it signs itself."""
    is_authority = key is signer
    names = [
        x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, n)]) for n in (subject, issuer)
    ]
    usages = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    unused = dict.fromkeys((*usages, "encipher_only", "decipher_only"), False)
    builder = (
        x509.CertificateBuilder()
        .subject_name(names[0])
        .issuer_name(names[1])
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - timedelta(days=60))
        .not_valid_after(NOW + timedelta(days=days))
        .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=not is_authority,
                key_cert_sign=is_authority,
                crl_sign=is_authority,
                **unused,
            ),
            critical=True,
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    if not is_authority:
        builder = builder.add_extension(x509.ExtendedKeyUsage([use]), critical=False)
    return builder.sign(signer, hashes.SHA256()).public_bytes(PEM)


def private(key, encryption=None) -> bytes:
    encryption = encryption or serialization.NoEncryption()
    return key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, encryption)


def chain(key, **options) -> bytes:
    authority = ec.generate_private_key(P256)
    own = certificate("An author", "A test's authority", key, authority, **options)
    return own + certificate("A test's authority", "A test's authority", authority, authority)


def signer_file(path: Path, key=None, **options) -> Path:
    key = key or ec.generate_private_key(P256)
    path.write_bytes(chain(key, **options) + private(key))
    return path


def checked(content: bytes, extension: str) -> dict:
    """The manifest of a signed image, after C2PA's reader found its signature valid."""
    with Reader(MEDIA_TYPES[extension], io.BytesIO(content)) as reader:
        assert reader.get_validation_state() == "Valid"
        values = json.loads(reader.json())
    return values["manifests"][values["active_manifest"]]


@pytest.mark.parametrize(
    "key",
    [
        ec.generate_private_key(P256),
        ec.generate_private_key(ec.SECP384R1()),
        rsa.generate_private_key(65537, 2048),
        ed25519.Ed25519PrivateKey.generate(),
    ],
    ids=["P-256", "P-384", "RSA", "Ed25519"],
)
def test_every_kind_of_key_signs_every_format(key, tmp_path):
    image = pixels(0, 1, 20)[0]
    with ImageSigner(signer_file(tmp_path / "signer.pem", key)) as signer:
        for extension in ENCODINGS:
            plain = encode_image(image, extension, mark=True)
            signed = signer.sign(plain, extension)
            manifest = checked(signed, extension)
            actions = manifest["assertions"][0]["data"]["actions"]
            assert actions == [{"action": "c2pa.created", "digitalSourceType": SOURCE_TYPE}]
            assert manifest["signature_info"]["issuer"] == "An author"
            assert is_marked(signed) and len(signed) - len(plain) < 6000
            np.testing.assert_array_equal(decode_image(signed), decode_image(plain))


def test_the_command_signs_every_exported_image(tmp_path):
    root, folder = make_root(tmp_path / "root"), tmp_path / "out"
    signer = signer_file(tmp_path / "signer.pem")
    assert semix("export", root.url, "--to", str(folder), "--sign", str(signer))[0] == 0
    with (folder / "labels.csv").open(newline="") as file:
        names = [row["file"] for row in csv.DictReader(file)]
    assert len(names) == 12
    for name in names:
        checked((folder / name).read_bytes(), "webp")


def broken(kind: str) -> bytes:
    key, other = ec.generate_private_key(P256), ec.generate_private_key(P256)
    secret = serialization.BestAvailableEncryption(b"secret")
    return {
        "expired": chain(key, days=-1) + private(key),
        "a web server's": chain(key, use=ExtendedKeyUsageOID.SERVER_AUTH) + private(key),
        "another key": chain(key) + private(other),
        "no key": chain(key),
        "no certificate": private(key),
        "encrypted": chain(key) + private(key, secret),
        "another curve": chain(ec.generate_private_key(ec.SECP256K1()))
        + private(ec.generate_private_key(ec.SECP256K1())),
        "cut": chain(key) + private(key).replace(b"\nM", b"\n!"),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("expired", "does not sign: .* not valid at time of signing"),
        ("a web server's", "does not sign: .* certificate is invalid"),
        ("another key", "does not sign: .* does not match"),
        ("no key", "has no private key"),
        ("no certificate", "has no readable certificate"),
        ("encrypted", "its private key is encrypted"),
        ("another curve", "its key is none that C2PA signs with"),
        ("cut", "its private key cannot be read"),
    ],
)
def test_a_certificate_that_does_not_sign_is_refused_by_name(kind, reason, tmp_path):
    path = tmp_path / "signer.pem"
    path.write_bytes(broken(kind))
    with pytest.raises(InputError, match=rf"--sign = {path}: {reason}") as caught:
        ImageSigner(path)
    assert "PRIVATE KEY" not in str(caught.value)


def test_nothing_is_written_with_a_certificate_that_does_not_sign(tmp_path):
    root = make_root(tmp_path / "root")
    path = tmp_path / "signer.pem"
    path.write_bytes(broken("expired"))
    status, _, error = semix("export", root.url, "--to", str(tmp_path / "out"), "--sign", str(path))
    assert status == 2 and "--sign" in error and "not valid at time of signing" in error
    assert not (tmp_path / "out").exists()
    missing = str(tmp_path / "none.pem")
    status, _, error = semix("export", root.url, "--to", str(tmp_path / "out"), "--sign", missing)
    assert status == 2 and "No such file" in error
