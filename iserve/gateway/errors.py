"""Every refusal of the gateway, in the OpenAI error form. One table: what happened, status, type, code."""

from __future__ import annotations

import math

import msgspec

from fingerprint.errors import IserveError
from planner.admission import Rejection

__all__ = ["WOULD_BE_LATE", "ApiError", "error_body"]

_RETRY_SOON_S = 1
WOULD_BE_LATE = "would_be_late"


class ApiError(IserveError):
    """A request that the gateway answers itself, with ``status`` and an OpenAI error body."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(status, message, code, param, retry_after_s, allow)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after_s, self.allow = retry_after_s, allow

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> bytes:
        return error_body(self.status, self.message, code=self.code, param=self.param)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers that the status owes its client in addition to the body."""
        headers = []
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.allow is not None:
            headers.append((b"allow", self.allow.encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers

    @classmethod
    def no_table(cls) -> ApiError:
        return cls(
            503, "the gateway has no route table yet; try again soon", "not_ready", retry_after_s=_RETRY_SOON_S
        )

    @classmethod
    def model_not_found(cls, model: str) -> ApiError:
        shown = model if len(model) <= 200 else model[:200] + "…"
        return cls(
            404,
            f"the model {shown!r} does not exist; GET /v1/models lists those that do",
            "model_not_found",
            "model",
        )

    @classmethod
    def queue_full(cls, model: str, waiting: int) -> ApiError:
        return cls(
            429,
            f"{waiting} requests already wait for {model!r}, its limit; try again later",
            "queue_full",
            retry_after_s=_RETRY_SOON_S,
        )

    @classmethod
    def no_turn(cls, model: str, waited_s: float) -> ApiError:
        return cls(
            503,
            f"no worker of {model!r} had room within {waited_s:g} s; it is busy, try again later",
            "queue_timeout",
            retry_after_s=_RETRY_SOON_S,
        )

    @classmethod
    def would_be_late(cls, model: str, rejection: Rejection) -> ApiError:
        """Return the error of a late request; not 429: the client did not send too much, and waiting would not
        help.
        """
        limit = rejection.limit
        what = {"ttft": "first token", "tpot": "time per token", "e2e": "last token"}[limit]
        loads = f" ({rejection.loads_s:.3g} s until its variant is loaded)" if rejection.loads_s else ""
        less = "" if loads else ": ask for less"  # a shorter request waits for its load as well
        why = f", as it would be with nobody before it{less}" if rejection.late_alone else ""
        return cls(
            503,
            f"this request would be late at {model!r}: {what} in {rejection.forecast_s:.3g} s by the "
            f"forecast{loads}, the limit is {limit}={rejection.limit_s:g} s{why}",
            WOULD_BE_LATE,
            retry_after_s=max(_RETRY_SOON_S, math.ceil(rejection.retry_after_s)),
        )

    @classmethod
    def no_ready_worker(cls, model: str, retry_after_s: int) -> ApiError:
        return cls(
            503,
            f"no worker of {model!r} is ready now; it is starting or being restarted, try again",
            "no_ready_worker",
            retry_after_s=retry_after_s,
        )

    @classmethod
    def cannot_start(cls, model: str, why: str, retry_after_s: int) -> ApiError:
        return cls(
            503,
            f"no worker of {model!r} could be started: {why}",
            "cannot_start",
            retry_after_s=retry_after_s,
        )


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    """Return ``{"error": {...}}`` as OpenAI clients parse it."""
    kind = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})
