"""Draws the README's pictures: commands that really run, on a terminal of their own, with the demo model.

    python docs/pictures.py

A worker answers the example questions while `submit --wait` and `status --watch` run; what their terminals show halfway
through, and then what `failed` shows, goes to `docs/pictures/` as SVG. Needs `models/demo` (`make demo` builds it).
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from contract import queues, server
from contract.settings import ProducerSettings

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
SVG = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""Without fonts that a reader's browser would have to fetch."""
WIDTH = 132
PATIENCE_S = 300.0
ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])")


class Screen:
    """What a terminal shows of a command that prints lines, redraws its last ones, or clears the whole."""

    def __init__(self, command: list[str], environment: dict[str, str], cwd: Path) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, WIDTH, 0, 0))
        named = [sys.executable, "-c", f"from {command[0]}.cli import main; main()", *command[1:]]
        self.process = subprocess.Popen(named, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=cwd)
        os.close(theirs)
        self._seen = b""

    def text(self) -> str:
        """The lines on the screen now, with their colours."""
        self._read()
        lines, row, at = [""], 0, 0
        content = self._seen.decode("utf-8", "replace")
        for found in ESCAPE.finditer(content):
            lines[row] += content[at : found.start()]
            at = found.end()
            numbers, letter, control = found.groups()
            if control == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif letter == "m":
                lines[row] += found.group()
            elif letter == "K":
                lines[row] = ""
            elif letter == "A":
                row = max(0, row - int(numbers or 1))
            elif letter == "J":
                lines, row = [""], 0
        lines[row] += content[at:]
        return "\n".join(lines).rstrip()

    def _read(self) -> None:
        while select.select([self._ours], [], [], 0)[0]:
            try:
                more = os.read(self._ours, 1 << 16)
            except OSError:  # the command has ended
                return
            if not more:
                return
            self._seen += more


def draw(name: str, title: str, text: str) -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(f"$ {title}\n{text}"), soft_wrap=True)
    PICTURES.mkdir(exist_ok=True)
    console.save_svg(str(PICTURES / f"{name}.svg"), title=title, code_format=SVG, unique_id=name)


def questions(file: Path) -> None:
    """The short prompts of the benchmarks, and two rows that cannot be read."""
    lines = (ROOT / "worker" / "bench" / "sets" / "short.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines if line.strip()][:96]
    rows = [json.dumps({"id": f"q{number}", "prompt": prompt}) for number, prompt in enumerate(prompts)]
    rows[7] = rows[7].replace('"prompt"', '"prompt', 1)
    rows[30] = json.dumps({"id": "q30", "prompt": prompts[30], "temprature": 0.7})
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("it took too long")
        time.sleep(0.1)


@contextlib.contextmanager
def working(settings: ProducerSettings, environment: dict[str, str]) -> Iterator[None]:
    """A worker on a server of its own, both gone afterwards."""
    redis = server.open_redis(settings)
    command = [sys.executable, "-m", "worker", "run", "--name", "worker-1", "--max-rows", "8"]
    worker = subprocess.Popen(command, env=environment, cwd=settings.root, stderr=subprocess.DEVNULL)
    try:
        until(lambda: bool(queues.workers(redis)))
        yield
    finally:
        worker.terminate()
        worker.wait()
        server.stop(settings)


def main() -> None:
    """Run the commands and draw what they show."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        settings = ProducerSettings(root=root)
        settings.folders.create().models.mkdir()
        (settings.folders.models / "demo").symlink_to((ROOT / "models" / "demo").resolve())
        environment = {**os.environ, "DLLM_ROOT": folder, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
        environment |= {"DLLM_LEASE_S": "3", "DLLM_THREADS": "1"}
        questions(root / "questions.jsonl")
        with working(settings, environment):
            submit = ["producer", "submit", "questions.jsonl", "--wait", "--max-new-tokens", "64"]
            submitting = Screen(submit, environment, root)
            watching = Screen(["producer", "status", "--watch"], environment, root)

            def halfway() -> bool:
                done = re.search(r"(\d+) done", submitting.text())
                return done is not None and int(done[1]) >= 40

            until(halfway)
            until(lambda: "HEARTBEAT" in watching.text() and "busy" in watching.text())
            draw("submit", " ".join(submit), submitting.text())
            draw("status", "producer status --watch", watching.text())
            watching.process.terminate()
            until(lambda: submitting.process.poll() is not None or not submitting.text())
            failed = Screen(["producer", "failed"], environment, root)
            until(lambda: failed.process.poll() is not None)
            draw("failed", "producer failed", failed.text())


if __name__ == "__main__":
    main()
