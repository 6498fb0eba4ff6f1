"""What a trainer says of itself and of its run, for people: status, and the plan of the next round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import trio

from swarmd.errors import ConfigError
from swarmd.plan.runs import partition, progress
from swarmd.plan.runs.partition import PartitionMember
from swarmd.plan.runs.synchronisation import Prediction, choose
from swarmd.plan.trust import gradient_audits
from swarmd.protocol.membership.records import PeerRecord
from swarmd.run_status import AuditsRow, PlanAnswer, PlanMemberRow, PlanSettingRow, RoundRow, RunPeerRow, RunRow
from swarmd.train.synchronisation import predictions
from swarmd.train.trainer import Trainer
from swarmd.train.vectors.codecs import codec_of
from swarmd.values import PeerId


def report(trainer: Trainer, device: str, worker: int | None, failure: str) -> RunRow:
    """Everything that ``swarmd train status`` shows of one run."""
    now = trio.current_time()
    recipe, state, ledger = trainer.run_spec.recipe, trainer.state, trainer.ledger
    version, joining = state.version if state else None, trainer.joining
    me = trainer.progress(ledger.epoch, ledger.head)
    total = progress.forecast([*trainer.members.progress(now), me], ledger.head, recipe.batch.target)
    return RunRow(
        run=trainer.run_spec.id,
        name=recipe.name,
        role=trainer.role,
        state=trainer.why_idle() or "running",
        why=trainer.doing,
        update=ledger.epoch,
        updates=recipe.stop.steps,
        head=ledger.head.hex(),
        state_update=version.epoch if version else None,
        state_digest=version.root.hex() if version else None,
        state_bytes=state.n_bytes if state else None,
        parameters=state.layout.n_elements if state else None,
        gathered=round(total.n_samples),
        target=recipe.batch.target,
        left_s=total.left_s,
        samples_per_s=trainer.computing.samples_per_s,
        anchors=tuple(trainer.chronicle.anchors),
        losses=tuple(ledger.losses()),
        samples=ledger.n_samples,
        samples_gathered=trainer.work.n,
        samples_counted=trainer.work.n_counted,
        samples_wasted=trainer.work.n_wasted,
        average_here=joining.round.share_here if joining.round else None,
        rounds_led=joining.counters.led,
        rounds_failed=joining.counters.failed,
        last_round=RoundRow(**asdict(joining.counters.last)) if joining.counters.last else None,
        last_part_s=joining.counters.last_part_s,
        catch_ups=trainer.catching_up.n_times if trainer.catching_up else 0,
        snapshots_fetched=trainer.catching_up.n_snapshots if trainer.catching_up else 0,
        last_catch_up_s=trainer.catching_up.last_s if trainer.catching_up else None,
        death_costs_at_most_s=round(joining.longest_wait_s, 2),
        peers=_others(trainer, now),
        shunned=tuple(trainer.members.shunned()),
        audits=_audits(trainer),
        measured_samples_per_s=trainer.pace.samples_per_s,
        predicted_samples_per_s=trainer.pace.predicted,
        device=device,
        worker=worker,
        failure=failure or trainer.trouble or trainer.memories.trouble or trainer.computing.trouble,
        finished=ledger.finished(),
    )


def _others(trainer: Trainer, now: float) -> tuple[RunPeerRow, ...]:
    return tuple(
        RunPeerRow(
            peer=peer,
            role=r.role,
            update=r.epoch,
            samples=r.n_samples,
            samples_per_s=r.samples_per_s,
            status=r.status,
        )
        for peer, r in sorted(trainer.members.look(now).items())
    )


def _audits(trainer: Trainer) -> AuditsRow:
    audits = trainer.audits
    one_in = trainer.run_spec.recipe.audit
    return AuditsRow(one_in=one_in, why_not=audits.why_not, trouble=audits.accusations.trouble, **asdict(audits.counts))


def plan(trainer: Trainer, peers: Mapping[PeerId, PeerRecord]) -> PlanAnswer:
    """Who would do what in the next round, and what each way of training would come to. Raises ConfigError."""
    recipe = trainer.run_spec.recipe
    codec = codec_of(recipe)
    records = trainer.members.look(trio.current_time())
    if trainer.state is None:
        raise ConfigError("the model is not loaded here yet: try again soon, or on a peer that trains")
    up, down = trainer.links()
    members = [PartitionMember(trainer.me, True, True, trainer.can_be_dialled(), up, down)]
    speeds = [trainer.computing.samples_per_s]
    for peer, record in records.items():
        if record.role != "anchor":
            known, computes = peers.get(peer), record.role == "train"
            up, down = (known.up_bytes_per_s, known.down_bytes_per_s) if known else (None, None)
            members.append(PartitionMember(peer, computes, computes, record.can_be_dialled, up, down))
            speeds.append(record.samples_per_s)
    sizes = codec.sizes(trainer.state.n_averaged, sum(m.contributes for m in members))
    try:
        decision = partition.divide(members, sizes)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    rows = tuple(
        PlanMemberRow(
            peer=m.peer,
            computes=m.contributes,
            reduces=share,
            up_bytes_per_s=m.up_bytes_per_s,
            down_bytes_per_s=m.down_bytes_per_s,
        )
        for m, share in zip(members, decision.action.shares, strict=True)
    )
    speeds = _without_audits(trainer, [m.peer for m in members], speeds)
    own, predicted = predictions(recipe, members, speeds, trainer.state.layout.n_elements)
    chosen = choose(predicted) if predicted else None
    trainer.pace.predicted = own.samples_per_s if own else None
    return PlanAnswer(
        run=trainer.run_spec.id,
        bytes=sizes.contribution,
        expected_s=decision.action.expected_s,
        equal_parts_s=partition.equal_parts(members, sizes).expected_s,
        why=decision.reason,
        members=rows,
        setting=str(own.setting) if own else "",
        settings=tuple(_row(p) for p in predicted),
        recommended=str(chosen.action.setting) if chosen else "",
        recommended_why=chosen.reason if chosen else "it is not known yet how fast anybody computes",
    )


def _without_audits(trainer: Trainer, peers: Sequence[PeerId], speeds: Sequence[float]) -> list[float]:
    """What is left of speeds for samples of one's own, where members compute again what others gave."""
    if trainer.audits.why_not:
        return list(speeds)
    own = {peer: speed for peer, speed in zip(peers, speeds, strict=True) if speed > 0}
    n_right = {PeerId(peer): n for peer, n in trainer.ledger.n_contributions.items()}
    again = gradient_audits.expected_rechecks(n_right, own, trainer.run_spec.recipe.audit)
    return [speed * speed / (speed + again[p]) if speed > 0 else 0.0 for p, speed in zip(peers, speeds, strict=True)]


def _row(predicted: Prediction) -> PlanSettingRow:
    return PlanSettingRow(
        setting=str(predicted.setting),
        update_s=predicted.update_s,
        utilisation=predicted.utilisation,
        excess=predicted.excess,
        samples_per_s=predicted.samples_per_s,
        bytes_per_sample=predicted.bytes_per_sample,
    )
