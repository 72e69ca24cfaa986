"""Signed provenance (C2PA) of exported images: who says that a model made them.

Images in shards are never signed: a signature is another one each time, and a shard's bytes are a
function of its plan. Source: C2PA Technical Specification 2.2; its library is c2pa-python.
"""

import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from semix.data.errors import InputError
from semix.data.files import read_bytes
from semix.data.images import encode_image
from semix.data.installation import DISTRIBUTION, install_command
from semix.data.marks import SOURCE_TYPE

if TYPE_CHECKING:  # loads a library of 30 MB
    from c2pa import C2paSigningAlg

OPTION = "--sign"
MAX_BYTES = 2**20  # of a file of certificates and a key, which has a few thousand
MEDIA_TYPES = {"webp": "image/webp", "png": "image/png", "jpg": "image/jpeg"}
PRIVATE_KEY = re.compile(rb"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.+?-----END \1-----", re.DOTALL)
CURVES = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
# A thumbnail would be larger than a small image, and cost a hundred times the signature's time.
SETTINGS = {"builder": {"thumbnail": {"enabled": False}}}


class ImageSigner:
    """Signs image files: a manifest says that a model made the image, and who signed that.

    It adds some 3 KB and takes 1 ms; no pixel changes. It asks no time-stamping server, so a viewer
    can check the signature for as long as the certificate is valid. Use it as a context manager.

    Args:
        path: a PEM file with the certificate chain, the signer's certificate first, and its private
            key, not encrypted: ECDSA, RSA (as PS256) or Ed25519.
    Raises:
        InputError: c2pa-python is not installed; no such file; no certificate or key in it, or a
            pair that makes no valid signature, as one that has expired or is not for signing.
    """

    def __init__(self, path: Path) -> None:
        if find_spec("c2pa") is None:
            remedy = f"needs c2pa-python; run {install_command('sign')}"
            raise InputError(OPTION, path, remedy)
        from c2pa import C2paError, C2paSignerInfo, Context, Settings, Signer

        chain, key, algorithm = _read(path)
        self._open = ExitStack()
        try:
            self._context = self._open.enter_context(Context(Settings.from_dict(SETTINGS)))
            signer = Signer.from_info(C2paSignerInfo(algorithm, chain, key, None))
            self._signer = self._open.enter_context(signer)
            self._try()
        except (C2paError, ValueError) as error:
            self._open.close()
            remedy = f"does not sign: {error}; give a certificate for signing and its key"
            raise InputError(OPTION, path, remedy) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def sign(self, content: bytes, extension: str) -> bytes:
        """The bytes of an image file, signed."""
        from c2pa import Builder

        signed = io.BytesIO()
        with Builder.from_json(json.dumps(_manifest()), context=self._context) as builder:
            builder.sign(self._signer, MEDIA_TYPES[extension], io.BytesIO(content), signed)
        return signed.getvalue()

    def _try(self) -> None:
        """Sign a small image and check it, so that a bad certificate is met before any export."""
        from c2pa import Reader

        image = self.sign(encode_image(np.zeros((8, 8, 3), np.uint8), "png"), "png")
        with Reader(MEDIA_TYPES["png"], io.BytesIO(image)) as reader:
            if reader.get_validation_state() == "Invalid":
                raise ValueError("its signature is not valid")


@contextmanager
def signing(path: Path | None) -> Iterator[Callable[[bytes, str], bytes] | None]:
    """`ImageSigner.sign` during the block; None without a file of certificates."""
    if path is None:
        yield None
        return
    with ImageSigner(path) as signer:
        yield signer.sign


def _manifest() -> dict[str, Any]:
    action = {"action": "c2pa.created", "digitalSourceType": SOURCE_TYPE}
    return {
        "claim_generator_info": [{"name": "semix", "version": version(DISTRIBUTION)}],
        "assertions": [{"label": "c2pa.actions.v2", "data": {"actions": [action]}}],
    }


def _read(path: Path) -> tuple[bytes, bytes, "C2paSigningAlg"]:
    """The certificate chain and the key of a PEM file, and the algorithm of the key.

    Raises:
        InputError: no message quotes the file, which holds a secret.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    try:
        content = read_bytes(path, max_bytes=MAX_BYTES)
    except OSError as error:
        raise InputError(OPTION, path, f"cannot be read: {error.strerror or error}") from None
    match = PRIVATE_KEY.search(content)
    if match is None:
        remedy = "has no private key; put the certificates and their key into one PEM file"
        raise InputError(OPTION, path, remedy)
    try:
        certificates = x509.load_pem_x509_certificates(content.replace(match[0], b""))
    except ValueError:
        remedy = "has no readable certificate; put the signer's first, then those of its issuers"
        raise InputError(OPTION, path, remedy) from None
    try:
        key = serialization.load_pem_private_key(match[0], password=None)
    except TypeError:
        remedy = "its private key is encrypted; decrypt it: openssl pkey -in KEY -out PLAIN"
        raise InputError(OPTION, path, remedy) from None
    except Exception:  # cryptography has errors of several types for unknown keys
        raise InputError(OPTION, path, "its private key cannot be read") from None
    encoding = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    key_content = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain)
    chain = b"".join(certificate.public_bytes(encoding) for certificate in certificates)
    return chain, key_content, _algorithm(path, key)


def _algorithm(path: Path, key: object) -> "C2paSigningAlg":
    from c2pa import C2paSigningAlg
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

    name = "unknown"
    if isinstance(key, ec.EllipticCurvePrivateKey):
        name = CURVES.get(key.curve.name, name)
    elif isinstance(key, rsa.RSAPrivateKey):
        name = "PS256"
    elif isinstance(key, ed25519.Ed25519PrivateKey):
        name = "ED25519"
    if name == "unknown":
        remedy = "its key is none that C2PA signs with; take ECDSA, RSA or Ed25519"
        raise InputError(OPTION, path, remedy)
    return C2paSigningAlg[name]
