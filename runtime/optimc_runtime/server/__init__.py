"""The HTTP front end: the OpenAI API over an engine.

A request's way: `answering` lets it in and logs its end, `body` reads it, `protocol` checks it, `prompts` turns it into
token ids, `submission` hands it to the engine, `generate` words the reply through the endpoint's shape (`chat`,
`completions`), `streaming` sends it.
"""

from optimc_runtime.server.app import build_app
from optimc_runtime.server.client import EngineClient
from optimc_runtime.server.keys import KeyRing
from optimc_runtime.server.options import ServerOptions
from optimc_runtime.server.serve import HttpServer, check_address, serve

__all__ = ["EngineClient", "HttpServer", "KeyRing", "ServerOptions", "build_app", "check_address", "serve"]
