"""What a node that was let in keeps of it: one file, so that a crash leaves all of it or none.

It holds the node's certificate, the issuer's above it, the one by which the node issues others, and the authority's:
each is known by what it says. They are no secret; the key, which is one, is in a file of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

from peerd.local.durable import replace
from peerd.local.node_key import NodeKey
from peerd.security import certificates
from peerd.security.certificates import Untrusted, is_authority, may_issue, public_key
from peerd.security.enrolment import Enrolment
from peerd.transport.errors import UserError

FILE = "certificate.pem"
_FILE_BYTES_MAX = 1 << 16


def write(state: Path, enrolment: Enrolment) -> None:
    """Keep it. Raises UserError."""
    own = [enrolment.issuer] if enrolment.issuer else []
    try:
        replace(state / FILE, certificates.pem([*enrolment.chain, *own, *enrolment.authorities]))
    except OSError as error:
        raise UserError(f"{state / FILE}: {error.strerror}") from None


def read(state: Path, key: NodeKey) -> Enrolment | None:
    """What is kept there for this key, whatever the time; None for nothing. Raises UserError for what is damaged."""
    path = state / FILE
    if not os.path.lexists(path):
        return None
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_BYTES_MAX)
        found = certificates.read_pem(content)
    except OSError as error:
        raise UserError(f"the node's certificate {path}: {error.strerror}; let this user read it") from None
    except Untrusted:
        found = []
    cure = "restore it from a backup, or remove it and give the node a new token (peerd token on a member)"
    nodes = [one for one in found if not may_issue(one)]
    authorities = [one for one in found if is_authority(one)]
    own = [one for one in found if may_issue(one) and public_key(one) == key.public]
    above = [one for one in found if one not in (*nodes, *authorities, *own)]
    if len(nodes) != 1 or not authorities or len(own) > 1:
        raise UserError(f"the node's certificate {path} is damaged; {cure}")
    if public_key(nodes[0]) != key.public:
        raise UserError(f"the certificate {path} is of another key than the node's; {cure}")
    chain = (nodes[0], *above)
    try:
        begins = max(one.not_valid_before_utc for one in chain)  # the clocks of those who gave them may differ
        certificates.check_chain(chain, authorities, begins)
    except Untrusted:
        raise UserError(f"the node's certificate {path} is not of the authority beside it; {cure}") from None
    return Enrolment(chain, tuple(authorities), own[0] if own else None)
