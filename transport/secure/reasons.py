"""Why is a certificate not taken? OpenSSL's errors and TLS's alerts (RFC 8446 section 6) in words: "it is ..."."""

from __future__ import annotations

import ssl

ANOTHER_AUTHORITY = "of another authority"
EXPIRED = "expired, or a clock is wrong"
EARLY = "not valid yet, or a clock is wrong"
REVOKED = "revoked"
REVOKED_ISSUER = "of an issuer that is revoked"
MISSING = "missing"
UNFIT = "not one that a node may have"

_OF_VERIFICATION = {  # X509_V_ERR_*; 7, a wrong signature: two authorities of one name
    2: ANOTHER_AUTHORITY, 7: ANOTHER_AUTHORITY, 18: ANOTHER_AUTHORITY, 19: ANOTHER_AUTHORITY, 20: ANOTHER_AUTHORITY,
    21: ANOTHER_AUTHORITY, 9: EARLY, 10: EXPIRED, 23: REVOKED,
}  # fmt: skip
_OF_ALERTS = {  # what OpenSSL sends for those
    "UNKNOWN_CA": ANOTHER_AUTHORITY, "DECRYPT_ERROR": ANOTHER_AUTHORITY, "CERTIFICATE_EXPIRED": EXPIRED,
    "CERTIFICATE_REVOKED": REVOKED, "CERTIFICATE_REQUIRED": MISSING, "BAD_CERTIFICATE": EARLY,
    "UNSUPPORTED_CERTIFICATE": UNFIT, "CERTIFICATE_UNKNOWN": UNFIT,
}  # fmt: skip


def of_certificate(error: ssl.SSLError) -> str | None:
    """Why the other end's certificate was not taken here; None: it is not about that."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _OF_VERIFICATION.get(error.verify_code, UNFIT)
    return None


def of_alert(error: ssl.SSLError) -> str | None:
    """Why ours was not taken there; None: it is not about that."""
    _, alert, name = (error.reason or "").partition("_ALERT_")
    return _OF_ALERTS.get(name) if alert else None


def is_put_out(why: str) -> bool:
    """Whether somebody said so of the node, or of who let it in."""
    return why == REVOKED or why.startswith(REVOKED_ISSUER)


def field(why: str) -> str:
    """What is to be mended, as a Refuse names it."""
    if why == REVOKED:
        return "revoked"
    if why.startswith(REVOKED_ISSUER):
        return "issuer"
    return "authority" if why == ANOTHER_AUTHORITY else "certificate"
