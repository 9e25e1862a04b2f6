"""What is wrong where TLS cannot be agreed on, in words that help. Package: errors; imports nothing of ours.

In: the error of any HTTP client. Out: a text about a certificate, or a port, that another attempt meets again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

__all__ = ["tls_flaw"]

_TRUST = (
    "To trust it, set SSL_CERT_FILE to a PEM file with the certificate of its authority (of itself, where it is "
    "self-signed) before the program starts"
)
_NOT_TLS = "it does not speak TLS at this port. Use http:// in the URL, or the port of HTTPS"
#: What is wrong with a certificate, by the number of OpenSSL, and what to do.
_CERTIFICATES = {
    9: "its certificate is not valid yet. Check the clock of this machine",
    10: "its certificate has expired. Its owner must renew it; check the clock of this machine, too",
    18: f"its certificate is self-signed. {_TRUST}",
    19: f"its certificate is of an authority that this machine does not trust. {_TRUST}",
    20: f"its certificate is of an authority that this machine does not know. {_TRUST}",
    21: f"its certificate is of an authority that this machine does not know. {_TRUST}",
    23: "its certificate is revoked. Ask its owner",
    62: "its certificate is for another host. Use the host name of the certificate in the URL",
    64: "its certificate is for another host. Use the host name of the certificate in the URL",
}
#: Other failures of a handshake that last, by the reason that OpenSSL names.
_HANDSHAKES = {
    **dict.fromkeys(("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE"), _NOT_TLS),
    **dict.fromkeys(
        ("UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION", "SSLV3_ALERT_HANDSHAKE_FAILURE"),
        "it has no version or cipher of TLS in common with this machine",
    ),
    **dict.fromkeys(
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "TLSV1_ALERT_UNKNOWN_CA", "SSLV3_ALERT_BAD_CERTIFICATE"),
        "it wants a certificate of this client, which has none that it takes",
    ),
}
#: Where errors hold the one below: aiohttp, urllib, urllib3.
_BELOW = ("certificate_error", "os_error", "reason", "__cause__", "__context__")
_MOST_LINKS = 32


def tls_flaw(error: BaseException | None) -> str:
    """Return what is wrong with a certificate or a port, and what to do; empty where it is anything else.

    Args:
        error: What a client of HTTP raised; the errors below it are searched, too.
    """
    ssl = sys.modules.get("ssl")
    if ssl is None:  # so it is no error of TLS
        return ""
    for each in _chain(error):
        if isinstance(each, ssl.SSLError):
            code, text = getattr(each, "verify_code", None), str(getattr(each, "verify_message", "") or "")
            if isinstance(code, int) and text:
                known = _CERTIFICATES.get(code, f"its certificate cannot be verified. {_TRUST}")
                return f"{known} ({text.rstrip('.')})"
            reason = str(getattr(each, "reason", ""))
            if reason in _HANDSHAKES:
                return f"{_HANDSHAKES[reason]} ({reason})"
    return ""


def _chain(error: object) -> Iterator[BaseException]:
    """Yield an error and those below it, each once."""
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < _MOST_LINKS:
        each = waiting.pop(0)
        if not isinstance(each, BaseException) or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [getattr(each, name, None) for name in _BELOW]
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions
