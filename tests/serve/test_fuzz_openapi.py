"""schemathesis, with all of its checks, over the OpenAPI document of a running server.

``ENCAST_FUZZ_EXAMPLES`` asks for more bodies an operation than make test has time for.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from local import ARTIFACTS, artifact
from servers import start_server

FUZZ = Path(__file__).parent / "fuzz"
KEY = "a key for fuzzing"


def test_every_operation_keeps_to_its_document(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    base = tmp_path_factory.getbasetemp()
    keys = tmp_path / "keys"
    keys.write_text(f"fuzz sha256:{hashlib.sha256(KEY.encode()).hexdigest()}\n")
    keys.chmod(0o600)
    models = [artifact(base, name) for name in ARTIFACTS if name not in ("other-embed", "features")]
    with start_server(*models, "--api-keys", keys, "--max-body-mb", "1", "--max-texts", "64") as server:
        done = subprocess.run(
            [
                sys.executable, "-m", "schemathesis.cli", "--config-file", FUZZ / "schemathesis.toml", "run",
                f"{server.url}/openapi.json", "-H", f"Authorization: Bearer {KEY}",
                f"--max-examples={os.environ.get('ENCAST_FUZZ_EXAMPLES', '8')}",
                "--generation-deterministic", "--continue-on-failure", "--no-color", "--workers=2",
            ],
            capture_output=True, text=True, check=False, cwd=tmp_path,
            env={**os.environ, "SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(FUZZ)},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert " 0 selected" not in done.stdout
        assert server.end() == 0
        assert server.err == []
