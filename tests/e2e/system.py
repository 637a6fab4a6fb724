"""A whole installation for a test: the installed commands as processes of their own, in a root of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from contract import server
from contract.ledger import Ledger
from contract.paths import Folders
from contract.settings import ProducerSettings
from tests.checkpoints import llama_block

BIN = Path(sys.executable).parent
START_S = 90.0  # importing torch and transformers, several at once on two cores


class System:
    """One root with a tiny model and its own local server, and the processes that were started on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folders = Folders(root).create()
        llama_block(root / "models" / "tiny", chat_template=True)
        self.started: list[subprocess.Popen[bytes]] = []
        self.environment = {**os.environ, "DLLM_ROOT": str(root), "DLLM_MODEL": "tiny", "DLLM_LEASE_S": "2"}
        self.environment |= {"DLLM_SCAN_S": "0.2", "DLLM_SETTLE_S": "0.1", "DLLM_THREADS": "1", "DLLM_DTYPE": "float32"}

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            env=self.environment,
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a command that runs until it is told to stop."""
        process = subprocess.Popen(
            [str(BIN / command[0]), *command[1:]],
            env=self.environment,
            cwd=self.root,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.started.append(process)
        return process

    def ledger(self) -> Ledger:
        return Ledger(server.open_redis(ProducerSettings(root=self.root)))

    def submit(self, name: str, rows: list[dict[str, Any]]) -> str:
        """Write a JSONL file beside the root and submit it; returns the batch id."""
        file = self.root / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        submitted = self.call("producer", "submit", name)
        assert submitted.returncode == 0, submitted.stderr
        return submitted.stdout.strip()

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folders.outputs / name).read_text().splitlines()]

    def log(self, name: str) -> list[dict[str, Any]]:
        lines = [line for file in self.folders.logs.glob(name) for line in file.read_text().splitlines()]
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        """Whatever was started is ended, and the server."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
        server.stop(ProducerSettings(root=self.root))
