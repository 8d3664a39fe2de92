"""A client that asks a server again and again: ``python -m tests.hosts.clients ADDRESS``.

Prints a line of JSON for each request: its status, 0 without an answer, the text or the error, and the seconds that
it took.
"""

from __future__ import annotations

import json
import sys
import time

import httpx

PROMPT, TOKENS = "how do I bake bread?", 12
PATIENCE = 30.0
"""Seconds until the client gives up."""


def main() -> None:
    """Ask until this process ends."""
    address = sys.argv[1]
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    while True:
        start = time.monotonic()
        try:
            answer = httpx.post(f"{address}/v1/completions", json=body, timeout=PATIENCE)
            status, content = answer.status_code, answer.json()
            text = content["choices"][0]["text"] if status == 200 else content["error"]["message"]
        except httpx.HTTPError as error:
            status, text = 0, type(error).__name__
        print(json.dumps({"status": status, "text": text, "seconds": time.monotonic() - start}), flush=True)
        time.sleep(0.02 if status == 200 else 0.5)


if __name__ == "__main__":
    main()
