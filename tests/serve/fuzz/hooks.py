"""What schemathesis is told about encast; it imports this module by itself, see ``test_fuzz_openapi.py``."""

from __future__ import annotations

import json
import re
from typing import Any

import schemathesis
from schemathesis.checks import CheckContext
from schemathesis.generation import GenerationMode

LONGEST_REFUSAL = 4096
"""In bytes. A refusal may quote a part of a request, never all of it."""

_INSIDE = re.compile(r'Traceback|File "|\.py\b|site-packages|/tmp/|/root/|/home/|/usr/|0x[0-9a-f]{8}')


def _whole(value: Any) -> Any:
    """A JSON value with integers for floats without a fraction: JSON Schema cannot tell 5.0 from 5, encast does."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _whole(one) for key, one in value.items()}
    return [_whole(one) for one in value] if isinstance(value, list) else value


@schemathesis.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    """Called with every generated body."""
    return _whole(body)


@schemathesis.check
def tells_no_secrets(ctx: CheckContext, response: schemathesis.Response, case: schemathesis.Case) -> None:
    """An error is short, and nothing shows paths or code."""
    if response.status_code < 400:
        return
    shown = response.text + "".join(f"{name}: {value}" for name, value in response.headers.items())
    sent = json.dumps(case.body, default=str) + case.formatted_path
    found = _INSIDE.search(shown)
    assert found is None or found[0] in sent, f"an answer shows {found[0]!r}"
    assert len(response.content) <= LONGEST_REFUSAL, f"a refusal of {len(response.content)} bytes"


@schemathesis.check
def has_an_id_and_a_time(ctx: CheckContext, response: schemathesis.Response, case: schemathesis.Case) -> None:
    """Every answer has the headers that the document promises."""
    assert re.fullmatch(r"[!-~]{1,128}", response.headers["x-request-id"][0])
    assert float(response.headers["x-total-time-ms"][0]) >= 0


@schemathesis.check
def openai_takes_what_fits(ctx: CheckContext, response: schemathesis.Response, case: schemathesis.Case) -> None:
    """OpenAI has 400 for what a model cannot serve; what does not fit the document is another code there."""
    if response.status_code != 400 or not case.path.startswith("/v1/embeddings"):
        return
    if case.meta is not None and case.meta.generation.mode == GenerationMode.POSITIVE:
        assert response.json()["error"]["code"] == "unprocessable", response.text
