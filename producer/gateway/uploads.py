"""A `multipart/form-data` body, written to the disk as it comes: memory does not grow with the file."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass, field

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from producer.gateway.door import GONE
from producer.gateway.errors import ApiError, bad_request
from producer.gateway.filestore import FileStore, Receiving, Stored

PIECE = 1 << 20
"""Bytes that are written at a time."""
LONGEST_FIELD = 1 << 10
MOST_FIELDS = 16
PURPOSES = ("batch",)


@dataclass
class Form:
    """The parts of a form as the parser finds them. Bytes of the file wait in `data` until they are taken."""

    filename: str | None = None
    fields: dict[str, bytes] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)
    ended: bool = False
    _headers: dict[bytes, bytes] = field(default_factory=dict)
    _header: tuple[bytes, bytes] = (b"", b"")
    _name: str = ""

    def parser(self, boundary: bytes) -> MultipartParser:
        return MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: self._read_header(data[start:end], b""),
                "on_header_value": lambda data, start, end: self._read_header(b"", data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._take,
                "on_end": self._end,
            },
        )

    def _begin(self) -> None:
        self._headers, self._header = {}, (b"", b"")

    def _read_header(self, name: bytes, value: bytes) -> None:
        self._header = self._header[0] + name, self._header[1] + value

    def _end_header(self) -> None:
        self._headers[self._header[0].lower()] = self._header[1]
        self._header = b"", b""

    def _end_headers(self) -> None:
        _, told = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = told.get(b"name", b"").decode("utf-8", "replace")
        if self._name == "file":
            if self.filename is not None:
                raise bad_request("there is more than one file", "file")
            self.filename = told.get(b"filename", b"").decode("utf-8", "replace") or "upload.jsonl"
        elif len(self.fields) >= MOST_FIELDS:
            raise bad_request("there are too many fields")
        else:
            self.fields[self._name] = b""

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self.data += data[start:end]
        elif len(self.fields[self._name]) + end - start > LONGEST_FIELD:
            raise bad_request(f"{self._name[:100]} is too long", self._name[:100])
        else:
            self.fields[self._name] += data[start:end]

    def _end(self) -> None:
        self.ended = True


async def receive(request: Request, store: FileStore, owner: str) -> Stored:
    """The uploaded file, on the disk. Raises ApiError; then nothing of it is left."""
    form = Form()
    parser = form.parser(_boundary(request))
    receiving: Receiving | None = None
    try:
        async for chunk in request.stream():
            parser.write(chunk)
            if form.filename is not None:
                receiving = receiving or await asyncio.to_thread(store.receive, form.filename)
            if receiving and len(form.data) >= PIECE:
                await asyncio.to_thread(receiving.write, bytes(form.data))
                form.data.clear()
        purpose = _purpose(form)
        if receiving is None or not form.ended:
            raise bad_request("the form has no field 'file', or ends too early", "file")
        await asyncio.to_thread(receiving.write, bytes(form.data))
        return await asyncio.to_thread(receiving.keep, owner, purpose)
    except ClientDisconnect:
        raise ApiError(GONE, "the client went away") from None
    except FormParserError as error:
        raise bad_request(f"the form cannot be read: {error}") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ApiError(507, "the service's disk is full", kind="server_error", code="disk_full") from None
        raise
    finally:
        if receiving is not None:
            await asyncio.shield(asyncio.to_thread(receiving.discard))


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise bad_request("upload a file as multipart/form-data, with the fields 'file' and 'purpose'")
    return options[b"boundary"]


def _purpose(form: Form) -> str:
    purpose = form.fields.get("purpose", b"").decode("utf-8", "replace")
    if purpose not in PURPOSES:
        raise bad_request(f"purpose must be one of {', '.join(PURPOSES)}", "purpose")
    return purpose
