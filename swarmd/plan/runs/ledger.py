"""The chain of a run's commits: what has been counted, what may follow, how the loss went."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from swarmd.errors import IntegrityError
from swarmd.protocol.runs.commit import Commit, CountedContribution, SealedCommit
from swarmd.protocol.runs.recipe import Run

LOSS_WINDOW = 10  # updates: the loss of one is noise
MOST_TARGETS = 4  # what one peer may count at once
RATE_TOLERANCE = 1e-6  # relative; all compute the rate from the same recipe, in float64


@dataclass(slots=True)
class Ledger:
    """See the module. ``steps`` counts updates as the optimizer does: a restored state brings back its own count.

    ``n_contributions``: in how many commits each peer was counted.
    """

    run: Run
    sealed: list[SealedCommit] = field(default_factory=list)
    next_draw: dict[str, int] = field(default_factory=dict)
    n_contributions: dict[str, int] = field(default_factory=dict)
    _steps: list[int] = field(default_factory=lambda: [0])
    _epochs: dict[bytes, int] = field(default_factory=dict)

    @property
    def epoch(self) -> int:
        """How many commits there are: the number of the newest update."""
        return len(self.sealed)

    @property
    def head(self) -> bytes:
        """The digest that the next commit names as its parent."""
        return self.sealed[-1].digest if self.sealed else self.run.genesis

    @property
    def steps(self) -> int:
        """Updates as the optimizer counts them."""
        return self._steps[-1]

    def digest_at(self, epoch: int) -> bytes:
        """Return the digest of one update's commit; the run's own before the first."""
        return self.sealed[epoch - 1].digest if epoch else self.run.genesis

    def knows(self, digest: bytes) -> bool:
        """Is this what any commit of the run names as its parent, or the newest?"""
        return digest == self.run.genesis or digest in self._epochs

    def steps_at(self, epoch: int) -> int:
        """Return the optimizer's count at one update."""
        return self._steps[epoch]

    def add(self, sealed: SealedCommit) -> bool:
        """Append what follows the head; False when it is known already. Raises IntegrityError."""
        commit = sealed.commit
        if commit.epoch <= self.epoch and self.digest_at(commit.epoch) == sealed.digest:
            return False
        self.check_next(commit)
        for counted in commit.contributors:
            self.next_draw[counted.peer] = counted.first + counted.n
            self.n_contributions[counted.peer] = self.n_contributions.get(counted.peer, 0) + 1
        self.sealed.append(sealed)
        self._epochs[sealed.digest] = self.epoch
        restored = self.restored_epoch(commit)
        self._steps.append(self._steps[restored] if restored is not None else self.steps + 1)
        return True

    def check_next(self, commit: Commit) -> None:
        """Refuse what cannot follow the head: another parent, samples counted twice, a wrong rate. IntegrityError."""
        if commit.run != self.run.genesis:
            raise IntegrityError("a commit of another run")
        if commit.epoch != self.epoch + 1 or commit.parent != self.head:
            parent = commit.parent.hex()[:12]
            raise IntegrityError(
                f"commit {commit.epoch} with parent {parent}; expected {self.epoch + 1} after {self.head.hex()[:12]}"
            )
        if self.sealed and commit.generation < self.sealed[-1].commit.generation:
            raise IntegrityError("a commit by anchors that its owner has replaced")
        for counted in commit.contributors:
            self.check_counted(counted)
        if commit.restores:
            self.restored_epoch(commit)
            return
        if commit.late and not self.may_be_late:
            raise IntegrityError("a commit with draws on a state before its own, which this run does not count")
        rate = self.run.recipe.learning_rate(self.steps + 1)
        if not math.isclose(commit.learning_rate, rate, rel_tol=RATE_TOLERANCE):
            raise IntegrityError(f"a learning rate of {commit.learning_rate}; the recipe says {rate}")

    @property
    def may_be_late(self) -> bool:
        """May draws on the state before the newest be counted by the next commit?"""
        if not self.run.recipe.overlaps or not self.sealed:
            return False
        return not self.sealed[-1].commit.restores

    def check_counted(self, counted: CountedContribution) -> None:
        """Refuse samples that are counted already, skipped, too many, or of a loss that none has. IntegrityError."""
        expected = self.next_draw.get(counted.peer, 0)
        peer = counted.peer[-8:]
        if counted.first < expected:
            raise IntegrityError(f"samples of {peer} would be counted twice")
        batch = self.run.recipe.batch
        n_at_most = MOST_TARGETS * batch.target + batch.micro
        if counted.first > expected or counted.n > n_at_most or counted.loss < 0:
            raise IntegrityError(
                f"{peer} counts {counted.n} samples from {counted.first} with a loss of {counted.loss:.3g}; expected "
                f"them from {expected}, at most {MOST_TARGETS} times the target, and a loss that is not negative"
            )

    def restored_epoch(self, commit: Commit) -> int | None:
        """Return the epoch whose state a commit brings back. Raises IntegrityError when it names none."""
        if not commit.restores:
            return None
        epoch = 0 if commit.restores == self.run.genesis else self._epochs.get(commit.restores)
        if epoch is None:
            raise IntegrityError("a commit restores a state that no commit of this run made")
        return epoch

    @property
    def n_samples(self) -> int:
        """How many samples all commits have counted."""
        return sum(sealed.commit.n_samples for sealed in self.sealed)

    def losses(self) -> list[float]:
        """Return the mean loss of each update, nats a token."""
        return [s.commit.loss for s in self.sealed if s.commit.contributors]

    def why_finished(self) -> str:
        """Why the run has come to its end; "" while it has not."""
        stop = self.run.recipe.stop
        if self.steps >= stop.steps:
            return f"{stop.steps} updates are done"
        recent = self.losses()[-LOSS_WINDOW:] if stop.loss else []
        if len(recent) == LOSS_WINDOW and sum(recent) / LOSS_WINDOW <= stop.loss:
            return f"the mean loss of {LOSS_WINDOW} updates is at most {stop.loss}"
        return ""
