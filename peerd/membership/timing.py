"""How often membership speaks and how long it waits: every constant with its formula."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """The pace of membership; N counts the live members, oneself included. The defaults suit a local network.

    None of it needs tuning by hand: what depends on the network (round trips) is measured, and these are floors.
    """

    gossip_interval_s: float = 0.2
    """At most one round of news per interval; a round with nothing to tell is not sent at all."""

    gossip_fanout: int = 3
    """Members told per round: news reaches N members in about log(N) / log(1 + fanout) rounds."""

    retransmit_mult: int = 4
    """Each member passes a piece of news on `retransmit_mult * ceil(log10(N + 1))` times (8 at 64, 16 at 1000)."""

    retransmit_min: int = 8
    """And at least so many times: with the 4 that are the product below 10, one piece of news in 11 missed one of 9
    members until the next exchange of tables, as each is told to members drawn at random."""

    probe_interval_s: float = 1.0
    """One probe per interval * (awareness + 1). Over all members, each is probed once per interval on average
    whatever N is, so a crash is first noticed after Exp(mean 1 interval), 4.6 intervals at the 99th percentile."""

    probe_timeout_s: float = 0.5
    """Wait for the direct answer: max(this, smoothed round trip + 4 * deviation) * (awareness + 1)."""

    indirect_probes: int = 3
    """Members asked to probe in our stead. At 5 % loss a direct probe fails once in 10 and each indirect one (four
    datagrams) once in 5, so a healthy member is suspected once in about 1700 probes."""

    suspicion_mult: float = 5.0
    """A suspicion confirmed by `suspicion_accusers` others lasts
    `suspicion_mult * probe_interval_s * max(1, log10(N + 1) / 3)`: 5 s up to 1000 members, where memberlist's
    4 * log10(N) would take 12 s. Two numbers box it in. From below: a daemon that stands still for 5 s (a held GIL)
    must only be suspected, and it is accused one probe (1 s) after it stopped at the earliest. From above: 99 % of
    1000 peers know of a crash within 12 s in 99 of 100 cases, which is 4.6 s until the first probe + 1 s for the
    probe + this + about 0.5 s of gossip. The log keeps pace with gossip beyond 1000, when a refutation needs longer."""

    suspicion_max_mult: float = 2.0
    """A suspicion that nobody confirms lasts this times as long. Confirmations come once per probe interval, so
    waiting longer (memberlist: 6) would only delay the case of a few members, where few can confirm."""

    suspicion_vacant_share: float = 0.4
    """Of the shortest suspicion: how long one lasts where our dial was answered by "nobody listens here". For a process
    that stands still its kernel listens, so only the refutation of one that lives behind a firewall that answers so
    must have the time to come: 2 s, ten rounds of gossip."""

    suspicion_accusers: int = 3
    """Distinct further accusers that bring a suspicion from its longest to its shortest (Lifeguard's K)."""

    awareness_max: int = 8
    """Upper bound of the local health score, so a slow node probes at most 9 times slower."""

    push_pull_interval_s: float = 30.0
    """Whole tables are exchanged every `push_pull_interval_s * max(1, 1 + ceil(log2(N / 32)))`, as in memberlist:
    a table grows with N, the need for it does not (30 s at 32, 180 s at 1000)."""

    seed_retry_first_s: float = 1.0
    """First wait before an isolated node dials its seeds and the failed again; it doubles up to `seed_retry_s`."""

    seed_retry_s: float = 30.0
    """Longest wait between such attempts, for ever. A node with company retries absent seeds and one failed member
    at this interval, stretched like push-pull so that the swarm does not hammer one dead address."""

    stall_s: float = 0.25
    """Woken later than this after the deadline asked for: we stood still, and know nothing about the others."""

    def suspicion_min_s(self, population: int) -> float:
        """The shortest a suspicion may last."""
        return self.suspicion_mult * self.probe_interval_s * max(1.0, math.log10(population + 1) / 3)

    def silence_s(self, population: int) -> float:
        """How long a member may be silent before all believe it dead: one probe, and a suspicion nobody confirms."""
        return self.probe_interval_s + self.suspicion_max_mult * self.suspicion_min_s(population)

    def retransmissions(self, population: int) -> int:
        """How many times one member passes on one piece of news."""
        return max(self.retransmit_min, self.retransmit_mult * math.ceil(math.log10(population + 1)))

    def stretch(self, population: int) -> int:
        """What the intervals of whole-table work are multiplied by."""
        return max(1, 1 + math.ceil(math.log2(max(1, population) / 32)))


LAN = Timing()

WAN = Timing(
    gossip_interval_s=0.5,
    gossip_fanout=4,
    probe_interval_s=5.0,
    probe_timeout_s=3.0,
    suspicion_mult=6.0,
    push_pull_interval_s=60.0,
)
"""Between sites: slower and more patient. A suspicion lasts 30 to 60 s."""
