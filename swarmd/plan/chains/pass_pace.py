"""How long a worker's passes take, how many sessions decode, and how long the next pass is worth waiting for."""

from __future__ import annotations

from swarmd.plan.chains.batching import ACTIVE_PASSES, MIN_ACTIVE_S, Speed, patience_s

SMOOTHING = 0.2  # weight of the newest pass in what a pass is expected to take


class PassPace:
    """What was learnt of passes so far. Times are of the caller's clock; sessions are named by any key."""

    def __init__(self) -> None:
        self.speed = Speed(0.01, 0.001)
        self._stepped_at: dict[object, float] = {}
        self._idle_since: float | None = None

    def n_active(self, now: float) -> int:
        """Return how many sessions decode: they made a step a short time ago."""
        recent = now - max(MIN_ACTIVE_S, ACTIVE_PASSES * self.speed.decode_pass_s)
        return sum(stepped_at > recent for stepped_at in self._stepped_at.values())

    def note_step(self, session: object, now: float) -> None:
        """Note that a session made a step."""
        self._stepped_at[session] = now

    def forget(self, session: object) -> None:
        """Forget a session that is closed."""
        self._stepped_at.pop(session, None)

    def begin_waiting(self, now: float) -> float:
        """Note that no pass is computed, if that is new; returns since when."""
        if self._idle_since is None:
            self._idle_since = now
        return self._idle_since

    def end_waiting(self) -> None:
        """Note that a pass begins."""
        self._idle_since = None

    def patience_s(self, n_ready: int, waited_s: float, now: float) -> float:
        """Return how long to wait for more steps, when so many are ready and the first has waited so long."""
        return patience_s(n_ready, self.n_active(now), waited_s, self.speed)

    def learn(self, n_prefill: int, n_sessions: int, took_s: float) -> None:
        """Follow what passes and prefill tokens take, by a pass with so many tokens of prefill."""
        speed = self.speed
        if not n_prefill:
            self.speed = Speed(_follow_value(speed.decode_pass_s, took_s), speed.prefill_token_s)
            return
        decode_s = speed.decode_pass_s if n_sessions > 1 else 0.0
        token_s = max(took_s - decode_s, took_s / 4) / n_prefill
        self.speed = Speed(speed.decode_pass_s, _follow_value(speed.prefill_token_s, token_s))


def _follow_value(old: float, new: float) -> float:
    return old + SMOOTHING * (new - old)
