"""The server's settings: where it listens, who may ask, and how much it takes on."""

from dataclasses import dataclass

from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.schemas.errors import ColdpressError


@dataclass(frozen=True)
class Settings:
    artifact: str
    host: str = "127.0.0.1"
    port: int = 8080
    """0 takes any free one."""
    dram_budget_bytes: int | None = None
    """None for the artifact's largest plan."""
    key: str | None = None
    """The secret that clients send as `Authorization: Bearer KEY` or `x-api-key: KEY`; None asks for nothing."""
    name: str | None = None
    """The model's name in requests; None for the folder's, without `.coldpress`."""
    max_queue: int = 64
    """Sequences that may wait; a request beyond them is refused with 429."""
    max_batch: int = FEW_TOKENS
    """Sequences that run at once."""
    batch_tokens: int | None = None
    """Most tokens of all running sequences together, prompts and new tokens; more than the plan's context takes DRAM
    from cached units while they run. None for the plan's context, which the budget has room for anyway."""
    max_tokens: int = 512
    """New tokens where a request does not say how many."""
    max_body_bytes: int = 4 << 20
    keep_alive_s: float = 10.0
    """Seconds without a piece of text after which a stream gets a comment, so that nobody takes it for dead."""
    prefixes: str | None = None
    """A folder for the keys and values of prompts, so that prompts with the same beginning start sooner; None keeps
    nothing."""
    prefix_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        for name, holds, expected in (
            ("port", 0 <= self.port < 1 << 16, "0 to 65535"),
            ("max_queue", self.max_queue >= 1, "at least 1"),
            ("max_batch", 1 <= self.max_batch <= FEW_TOKENS, f"1 to {FEW_TOKENS}"),
            ("batch_tokens", self.batch_tokens is None or self.batch_tokens >= 1, "at least 1"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("max_body_bytes", self.max_body_bytes >= 1, "at least 1"),
            ("prefix_bytes", self.prefix_bytes >= 1, "at least 1"),
            ("keep_alive_s", self.keep_alive_s > 0, "more than 0 s"),
            ("key", self.key is None or bool(self.key), "at least one character"),
        ):
            if not holds:
                raise ColdpressError(f"the server's {name} is {getattr(self, name)!r}, expected {expected}")
