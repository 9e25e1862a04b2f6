"""Refusal: why a request is not carried out, with the status and the code of its answer. Pure."""

from __future__ import annotations

from http import HTTPStatus


class Refusal(Exception):  # noqa: N818  it is an answer, no defect
    """A request is not carried out; raised by services and routes, answered as a `Failure` (S-SRV-4).

    Attributes:
        status: Of the answer.
        code: Stable name of the reason for programs, such as `RUN_NOT_FOUND`.
        message: What is wrong and what to do.
        retry_after_s: After how long it may be asked again; None: that would not help.
        missing: Inputs that the team needs.
        run_id: The run that it is about.
        error: Class of the error, in the answer: `InvalidRequest`, but for what a run would raise.
        param: The field of the request that is wrong, where one alone is.
        headers: More headers of the answer.
    """

    def __init__(  # noqa: PLR0917  positional, so that it can be pickled
        self,
        status: HTTPStatus,
        code: str,
        message: str,
        retry_after_s: int | None = None,
        missing: tuple[str, ...] = (),
        run_id: str | None = None,
        error: str = "InvalidRequest",
        param: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(status, code, message, retry_after_s, missing, run_id, error, param, headers)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        self.missing = missing
        self.run_id = run_id
        self.error = error
        self.param = param
        self.headers = headers

    def __str__(self) -> str:
        return self.message
