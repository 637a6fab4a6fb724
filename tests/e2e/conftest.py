"""What end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.system import System


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    opened = System(tmp_path)
    try:
        yield opened
    finally:
        opened.end()
