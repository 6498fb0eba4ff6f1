"""A swarm of 200 in which a tenth lies, in virtual time: wrong results and cost by the hour, by the rules of plan/.

python -m benchmarks.trust_sim [--hours 8] [--seed 1]

Ten spans, 20 holders each; 50 clients have windows of tokens computed by chains of ten hops. The liars all came by one
leaked invite and take new identities each hour; each lies in a share of its passes, but never in what looks like a
probe. Rates, verdicts and trust are plan.trust.audits', plan.trust.equality's and plan.trust.reputation's; a check
costs 1/13 of what it checks (a prefill), a replica of BOINC's quorum all of it. A result is wrong when any hop of its
chain lied. *Without vouchers* is the same without blame that climbs.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from dataclasses import dataclass, field

from swarmd.plan.trust.audits import AuditRecord, is_due
from swarmd.plan.trust.equality import AuditVerdict, two_of_three
from swarmd.plan.trust.reputation import Trust, make_finding, name_of, rate_servers
from swarmd.protocol.membership.records import PeerRecord, ProbeFinding, SpanRecord
from swarmd.values import PeerId

N_SPANS, N_HOLDERS, LIARS, N_CLIENTS = 10, 20, 20, 50
RESULTS_AN_HOUR = 2_000  # windows of 64 tokens: 40 of each client
PREFILL_COST = 1 / 13  # of decoding the same tokens (docs/trust.md)


@dataclass
class Swarm:
    """Who is there, who lies, what members announce, and what each client has found."""

    rng: random.Random
    share: float
    climbs: bool
    checks: bool = True
    spans: list[SpanRecord] = field(default_factory=list)
    liars: set[str] = field(default_factory=set)
    found: dict[str, dict[tuple[str, bytes], ProbeFinding]] = field(default_factory=lambda: defaultdict(dict))
    records: dict[tuple[int, str], AuditRecord] = field(default_factory=dict)
    trust: dict[tuple[str, int], Trust] = field(default_factory=dict)
    n_accused: int = 0

    def begin_hour(self, hour: int) -> None:
        """All liars come back as somebody else."""
        honest = [s for s in self.spans if s.peer not in self.liars]
        self.spans = honest or [span(f"h{n}", n % N_SPANS) for n in range(N_SPANS * N_HOLDERS - LIARS)]
        self.liars = {f"liar{hour}.{n}" for n in range(LIARS)}
        self.spans += [span(peer, n % N_SPANS) for n, peer in enumerate(sorted(self.liars))]
        for target in self.spans:  # every probe is right: who lies knows one when it sees it
            for peer in ("h0", "h1"):
                self.found[peer].setdefault((target.peer, name_of(target)), make_finding(target, True))
        self.regard()

    def voucher_of(self, peer: PeerId) -> bytes:
        return b"leaked" if peer.startswith("liar") and self.climbs else peer.encode()

    def regard(self) -> None:
        said = [record(peer, tuple(found.values())) for peer, found in self.found.items()]
        self.trust = rate_servers(self.spans, said, self.voucher_of)
        self.usable = [
            [s.peer for s in self.spans if s.start == n and self.trust.get((s.peer, 0)) is Trust.PROVEN]
            for n in range(N_SPANS)
        ]

    def lies(self, peer: str) -> bool:
        return peer in self.liars and self.rng.random() < self.share

    def result(self, client: int) -> tuple[bool, int, int]:
        """One window through a chain: (is it wrong, hops checked, computed again)."""
        is_wrong, n_checks, n_again = False, 0, 0
        for holders in self.usable:
            peer = self.rng.choice(holders)
            lied = self.lies(peer)
            is_wrong |= lied
            known = self.records.get((client, peer), AuditRecord())
            if not self.checks or not is_due(known, self.rng.random()).action:
                continue
            n_checks, n_again = n_checks + 1, n_again + 1
            others = self.rng.sample([p for p in holders if p != peer], 2)
            answers = [lied, self.lies(others[0]), self.lies(others[1])]  # no two lies are the same
            with_first = not answers[0] and not answers[1]
            n_again += not with_first
            verdict = two_of_three(with_first, not (answers[0] or answers[2]), not (answers[1] or answers[2]))
            if verdict is AuditVerdict.RIGHT:
                self.records[client, peer] = known.after(is_right=True)
            elif verdict is AuditVerdict.WRONG:
                self.ban(peer)
            elif verdict is AuditVerdict.REFERENCE_WRONG:
                self.ban(others[0])
        return is_wrong, n_checks, n_again

    def ban(self, peer: str) -> None:
        self.n_accused += peer not in self.liars
        target = next(s for s in self.spans if s.peer == peer)
        for judge in ("h0", "h1", "h2"):  # those who computed it too
            self.found[judge][peer, name_of(target)] = make_finding(target, False, self.voucher_of(PeerId(peer)))
        self.regard()


def span(peer: str, number: int) -> SpanRecord:
    about = {"model": "m", "start": number, "end": number + 1, "state": "online"}
    return SpanRecord(peer=peer, sequence=1, issued_at=0, expires_at=9, certificate=(), **about)  # type: ignore[arg-type]


def record(peer: str, found: tuple[ProbeFinding, ...]) -> PeerRecord:
    return PeerRecord(peer=peer, sequence=1, issued_at=0, expires_at=9, certificate=(), found=found)


def hour_by_hour(swarm: Swarm, hours: int) -> tuple[list[float], float]:
    """The share of wrong results in each hour, and what checks cost of all computing."""
    wrong, n_again = [], 0
    for hour in range(hours):
        swarm.begin_hour(hour)
        results = [swarm.result(n % N_CLIENTS) for n in range(RESULTS_AN_HOUR)]
        wrong.append(sum(r[0] for r in results) / RESULTS_AN_HOUR)
        n_again += sum(r[2] for r in results)
    return wrong, n_again * PREFILL_COST / (hours * RESULTS_AN_HOUR * N_SPANS)


def quorum(share: float, n_together: int = 0) -> float:
    """Wrong results of BOINC's quorum of two, which needs two alike: liars who agree on their lie, or none."""
    of_liars = LIARS / (N_SPANS * N_HOLDERS)
    both = of_liars * (n_together - 1) / (N_SPANS * N_HOLDERS - 1) * share if n_together else 0.0
    return 1 - (1 - both) ** N_SPANS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    print("| liars lie in | how | wrong results by the hour, % | cost | honest ones accused |\n|---|---|---|---|---|")
    for share in (0.01, 0.1, 0.5, 1.0):
        for name, climbs, checks in (
            ("no checks", False, False),
            ("without vouchers", False, True),
            ("swarmd", True, True),
        ):
            swarm = Swarm(random.Random(given.seed), share, climbs, checks)
            wrong, cost = hour_by_hour(swarm, given.hours)
            told = " ".join(f"{100 * w:.2f}" for w in wrong)
            print(f"| {100 * share:.0f} % | {name} | {told} | {100 * cost:.1f} % | {swarm.n_accused} |", flush=True)
        print(f"| {100 * share:.0f} % | quorum of two, liars apart | {100 * quorum(share):.2f} | 100 % | 0 |")
        agreed = f"{100 * quorum(share, LIARS):.2f}"
        print(f"| {100 * share:.0f} % | quorum of two, liars agree | {agreed} | 100 % | 0 |", flush=True)


if __name__ == "__main__":
    main()
