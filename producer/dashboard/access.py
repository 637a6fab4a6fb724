"""Who may look, and who may act: API keys, the cookie that a browser gets for one, and proof that a form is ours.

The cookie holds the time at which it ends and a signature over that and the key's hash, made with a secret of this
process: it tells nothing of the key, ends when the key is revoked, and is worthless to another process or after a new
start. Without any key only this machine may look, under a name that no other site can lead here.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import Request

from contract.settings import ProducerSettings
from producer.gateway import keys
from producer.gateway.keys import Key, Keys
from producer.gateway.loopback import is_loopback

COOKIE = "dllm-dashboard"
SESSION_S = 12 * 3600
LOOK_S = 1.0
"""Keys are read again this often."""
NOBODY = "-"


class Refused(Exception):
    """The request is answered with `status` and nothing else."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Viewer:
    """Who looks: the key's name, and the word that forms of this session carry; None for who cannot send forms."""

    name: str
    token: str | None


class Access:
    """The rules of one process. `host` is the address it listens on."""

    def __init__(self, settings: ProducerSettings, host: str, known: Keys) -> None:
        self._settings = settings
        self._secret = secrets.token_bytes(32)
        self._guard = threading.Lock()
        self._keys, self._read_at = known, time.monotonic()
        self._needs_key = bool(known.known) or not is_loopback(host)

    def viewer(self, request: Request) -> Viewer | None:
        """Who asks; None for who has to log in first. Raises Refused for a name that is not this machine's."""
        known = self._known()
        if not self._needs_key:
            if not is_loopback(request.url.hostname or ""):
                raise Refused(421, "without API keys this page answers as localhost: `producer key NAME` makes one")
            return Viewer(NOBODY, self._sign("form", ""))
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and (key := known.find(given.strip())):
            return Viewer(key.name, None)
        cookie = request.cookies.get(COOKIE, "")
        found = self._holder(cookie, known)
        return Viewer(found.name, self._sign("form", cookie)) if found else None

    def cookie(self, given: str) -> str | None:
        """The cookie for who gives this key; None where it is not known."""
        key = self._known().find(given)
        return self._cookie(key, int(time.time()) + SESSION_S) if key else None

    def check_form(self, request: Request, viewer: Viewer, token: str) -> None:
        """Raises Refused for a form that did not come from a page of ours, shown to this viewer."""
        check_origin(request)
        if viewer.token is None or not hmac.compare_digest(viewer.token.encode(), token.encode()):
            raise Refused(403, "this form is not of this session: load the page again")

    def _known(self) -> Keys:
        with self._guard:
            if time.monotonic() - self._read_at > LOOK_S:
                self._keys, self._read_at = keys.load(self._settings), time.monotonic()
                self._needs_key |= bool(self._keys.known)
            return self._keys

    def _holder(self, cookie: str, known: Keys) -> Key | None:
        until, _, _ = cookie.partition(".")
        if not (until.isascii() and until.isdecimal() and len(until) < 12) or int(until) < time.time():
            return None
        given, found = cookie.encode(), None
        for key in known.known:
            if hmac.compare_digest(self._cookie(key, int(until)).encode(), given):
                found = key
        return found

    def _cookie(self, key: Key, until: int) -> str:
        return f"{until}.{self._sign(f'cookie.{until}', key.hash)}"

    def _sign(self, kind: str, text: str) -> str:
        return hmac.new(self._secret, f"{kind}:{text}".encode(), hashlib.sha256).hexdigest()


def check_origin(request: Request) -> None:
    """Raises Refused unless the browser says that the form was on a page of this very address."""
    origin = urlsplit(request.headers.get("origin", ""))
    if not origin.netloc or origin.netloc.lower() != request.headers.get("host", "").lower():
        raise Refused(403, "this form did not come from this page")
