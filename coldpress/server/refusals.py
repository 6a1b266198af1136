"""Refusals of the server: a status of HTTP and one sentence."""

from coldpress.schemas.errors import ColdpressError


class RefusalError(ColdpressError):
    """A request that is not answered; the client gets its status and its sentence."""

    def __init__(self, status: int, text: str, field: str | None = None) -> None:
        """`field` is the field of the request that is wrong, such as `messages.0.role`."""
        super().__init__(text)
        self.status, self.field = status, field


KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Status -> kind of error, as clients of both vendors know them; others are `api_error`."""


def openai_error(status: int, text: str, field: str | None = None) -> dict[str, object]:
    kind = KINDS.get(status, "api_error")
    return {"error": {"message": text, "type": kind, "param": field, "code": kind}}


def anthropic_error(status: int, text: str) -> dict[str, object]:
    return {"type": "error", "error": {"type": KINDS.get(status, "api_error"), "message": text}}
