"""A system under fire: workers, a producer and a server are killed, stopped and restarted at random; and the tally.

    python -m tests.e2e.chaos [SECONDS] [PROMPTS] [SEED]

Runs on a root and a local server of its own. Every second one signal goes to one process; the server is killed and
started again a few times. Then everybody is left in peace until the last batch is published.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contract import server
from contract.paths import Folders
from contract.settings import ProducerSettings
from tests.checkpoints import llama_block

BIN = Path(sys.executable).parent
WORKERS = 3
FILES = 20
PEACE_S = 240.0
"""How long the system may take to recover; a killed producer's lock on a batch alone lasts 30 s."""
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT)


@dataclass
class Tally:
    """What was done to the system, and what came out."""

    signals: Counter[str] = field(default_factory=Counter)
    server_kills: int = 0
    seconds: float = 0.0
    prompts: int = 0
    rows: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    doubled: int = 0
    unfinished: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        done = ", ".join(f"{name} {count}" for name, count in sorted(self.signals.items()))
        failed = ", ".join(f"{code} {count}" for code, count in sorted(self.errors.items())) or "none"
        return (
            f"{done}, server killed {self.server_kills} times; {self.prompts} prompts: {self.rows} output rows, "
            f"error rows: {failed}; lost {self.lost}, doubled {self.doubled}; {self.seconds:.0f} s"
        )


class Chaos:
    """The processes of one root, by role, and the means to hurt them."""

    def __init__(self, root: Path, prompts: int, seed: int) -> None:
        self.folders = Folders(root).create()
        self.settings = ProducerSettings(root=root)
        self.tally = Tally(prompts=prompts)
        self._random = random.Random(seed)
        self._roles: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {**os.environ, "DLLM_ROOT": str(root), "DLLM_MODEL": "tiny", "DLLM_DTYPE": "float32"}
        self._environment |= {"DLLM_LEASE_S": "3", "DLLM_SCAN_S": "0.5", "DLLM_SETTLE_S": "0", "DLLM_THREADS": "1"}
        llama_block(root / "models" / "tiny")

    def run(self, seconds: float, server_kills: int = 3) -> Tally:
        """Signals for `seconds`, then peace until everything is published or `PEACE_S` is over."""
        started = time.monotonic()
        server.open_redis(self.settings)
        files = self._drop()
        try:
            self._revive()
            self._fire(seconds, server_kills)
            self._make_peace()
            self._wait(files)
        finally:
            for process in self._roles.values():
                process.kill()  # also what is stopped
                process.wait()
            server.stop(self.settings)
        self._count(files)
        self.tally.seconds = time.monotonic() - started
        return self.tally

    def _drop(self) -> list[str]:
        """Files of prompts; the last line of each is no JSON and must become an error row."""
        each = self.tally.prompts // FILES
        names = [f"file-{number}" for number in range(FILES)]
        for name in names:
            lines = [json.dumps({"prompt": f"{name} {row}", "max_new_tokens": 24}) for row in range(each - 1)]
            (self.folders.inputs / f"{name}.jsonl").write_text("\n".join([*lines, "no JSON"]) + "\n")
        self.tally.prompts = each * FILES
        return names

    def _revive(self) -> None:
        """Start what is not running."""
        commands = {"producer": ["producer", "watch"]}
        commands |= {f"w{n}": ["worker", "run", "--name", f"w{n}", "--max-rows", "8"] for n in range(WORKERS)}
        for role, command in commands.items():
            if role not in self._roles or self._roles[role].poll() is not None:
                self._roles[role] = subprocess.Popen(
                    [str(BIN / command[0]), *command[1:]],
                    env=self._environment,
                    cwd=self.settings.root,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )

    def _fire(self, seconds: float, server_kills: int) -> None:
        started = time.monotonic()
        while (passed := time.monotonic() - started) < seconds:
            time.sleep(1.0)
            role, number = self._random.choice(sorted(self._roles)), self._random.choice(SIGNALS)
            self._roles[role].send_signal(number)
            self.tally.signals[number.name] += 1
            if self.tally.server_kills < server_kills * passed // seconds:
                self._kill_server()
            self._revive()
        while self.tally.server_kills < server_kills:
            self._kill_server()

    def _kill_server(self) -> None:
        address = json.loads((self.folders.redis / "server.json").read_text())
        os.kill(address["pid"], signal.SIGKILL)
        self.tally.server_kills += 1
        server.open_redis(self.settings)

    def _make_peace(self) -> None:
        for process in self._roles.values():
            process.send_signal(signal.SIGCONT)
        self._revive()

    def _wait(self, names: list[str]) -> None:
        deadline = time.monotonic() + PEACE_S
        while time.monotonic() < deadline:
            self.tally.unfinished = [name for name in names if not (self.folders.outputs / f"{name}.jsonl").exists()]
            if not self.tally.unfinished:
                return
            self._revive()
            time.sleep(0.5)

    def _count(self, names: list[str]) -> None:
        each = self.tally.prompts // FILES
        for name in names:
            answers = self._rows(f"{name}.jsonl")
            errors = self._rows(f"{name}.errors.jsonl")
            seen = Counter(int(row["id"]) for row in [*answers, *errors])
            self.tally.rows += len(answers)
            self.tally.errors.update(row["error"]["code"] for row in errors)
            self.tally.lost += sum(index not in seen for index in range(each))
            self.tally.doubled += sum(count - 1 for count in seen.values())

    def _rows(self, name: str) -> list[dict[str, Any]]:
        file = self.folders.outputs / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main(arguments: list[str]) -> int:
    seconds, prompts, seed = (int(value) for value in [*arguments, *["600", "20000", "0"][len(arguments) :]])
    with tempfile.TemporaryDirectory(prefix="dllm-chaos-") as folder:
        tally = Chaos(Path(folder), prompts, seed).run(seconds, server_kills=max(3, seconds // 60))
    sys.stdout.write(f"{tally}\n")
    return int(bool(tally.lost or tally.doubled or tally.unfinished))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
