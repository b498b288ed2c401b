"""Serve a plan, ask it one question over the OpenAI-compatible API, print the streamed answer, stop the server.

python examples/ask_server.py PLAN "What is the capital of France?" [--expect Paris]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import httpx


def main() -> int:
    """Return 0 if the answer came (and holds what was expected)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan")
    parser.add_argument("question")
    parser.add_argument("--expect", help="fail unless the answer contains this")
    arguments = parser.parse_args()

    # Port 0 lets the system choose a free one; the server's ready line on standard output says which.
    command = [sys.executable, "-m", "optimc", "serve", arguments.plan, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            answer = ask(wait_until_ready(server), arguments.question)
        finally:
            server.terminate()
    if arguments.expect is not None and arguments.expect not in answer:
        print(f"expected '{arguments.expect}' in the answer", file=sys.stderr)
        return 1
    return 0


def wait_until_ready(server: subprocess.Popen[str]) -> str:
    """Return the server's base URL, read from its ready line."""
    assert server.stdout is not None
    for line in server.stdout:
        print(line, end="")
        if " ready on http" in line:
            return line.split(" ready on ")[1].split()[0]
    raise SystemExit(f"the server stopped with exit code {server.wait()}")


def ask(url: str, question: str) -> str:
    """Stream one chat completion from `url`, print it as it comes and return the whole text."""
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 64, "stream": True}
    print(f"> {question}")
    pieces = []
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    pieces.append(choice["delta"].get("content") or "")
                    print(pieces[-1], end="", flush=True)
    print()
    return "".join(pieces)


if __name__ == "__main__":
    sys.exit(main())
