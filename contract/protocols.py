"""Which object stores `outputs_url` may name. What is put into them is `contract.objects`' matter."""

from __future__ import annotations

from urllib.parse import urlsplit

PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "oss": "ossfs",
    "oci": "ocifs",
    "file": "fsspec",
    "memory": "fsspec",
}
"""Protocols whose objects appear whole, and the package that speaks each. `memory` is for tests within one process."""


def checked(url: str) -> str:
    """`url` as a setting may name it. Raises ValueError, without its text, which may hold a secret."""
    parts = urlsplit(url)
    if parts.scheme not in PACKAGES:
        known = ", ".join(f"{name}://" for name in PACKAGES if name != "memory")
        raise ValueError(f"an address of one of {known} is expected, whose objects appear whole or not at all")
    if parts.password is not None or parts.query or parts.fragment:
        package = PACKAGES[parts.scheme]
        raise ValueError(f"no password or option belongs in it: give them to {package} by its environment or files")
    if not parts.path.strip("/") if parts.scheme == "file" else not parts.netloc:
        raise ValueError("it names no place: write file:///PATH or s3://BUCKET/PREFIX")
    if parts.scheme == "file" and parts.netloc:
        raise ValueError("a path begins with a slash: write file:///PATH")
    return url.rstrip("/")
