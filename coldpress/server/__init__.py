"""Serves an artifact over HTTP, in the interfaces of OpenAI and Anthropic.

    coldpress serve mistral-7b-pixel6.coldpress --port 8080 --dram 3GB

The path of a request: `app` finds its handler, which reads the body (`answers`, `fields`), turns it into token ids
(`served`) and submits sequences; the one thread of `worker` runs them together, and `run` follows their pieces.
"""

from coldpress.server.command import serve

__all__ = ["serve"]
