"""What a trainer says of itself and of its run, for people: status, and the plan of the next round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import trio

from swarmd.errors import ConfigError
from swarmd.plan.runs import partition, progress
from swarmd.plan.runs.partition import PartitionMember
from swarmd.plan.runs.stages import forecast_pipeline
from swarmd.plan.runs.synchronisation import Prediction, choose_setting
from swarmd.plan.trust import gradient_audits
from swarmd.protocol.membership.records import PeerRecord
from swarmd.protocol.runs.recipe import ENDS
from swarmd.run_status import (
    AuditsRow,
    PipelineRow,
    PlanAnswer,
    PlanMemberRow,
    PlanSettingRow,
    RoundRow,
    RunPeerRow,
    RunRow,
    StageRow,
)
from swarmd.train.stages.computing import StageComputing
from swarmd.train.synchronisation import predict_settings
from swarmd.train.trainer import Trainer
from swarmd.train.vectors.codecs import codec_of
from swarmd.values import PeerId


def report_run(
    trainer: Trainer,
    device: str,
    worker: int | None,
    failure: str,
) -> RunRow:
    """Collect everything that ``swarmd train status`` shows of one run."""
    now = trio.current_time()
    recipe = trainer.run_spec.recipe
    state = trainer.state
    ledger = trainer.ledger
    version = state.version if state else None
    joining = trainer.joining
    me = trainer.progress(ledger.epoch, ledger.head)
    everybody = [*trainer.members.progress(now), me]
    total = progress.forecast_round(everybody, ledger.head, recipe.batch.target)
    return RunRow(
        run=trainer.run_spec.whole,
        name=recipe.name,
        role=trainer.role,
        state=trainer.idleness.why() or "running",
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
        peers=_member_rows(trainer, now),
        shunned=tuple(trainer.members.shunned()),
        audits=_audit_row(trainer),
        measured_samples_per_s=trainer.pace.samples_per_s,
        predicted_samples_per_s=trainer.pace.predicted,
        device=device,
        worker=worker,
        failure=failure or trainer.checkpoints.trouble or trainer.memories.trouble or trainer.computing.trouble,
        finished=ledger.why_finished(),
        stage=trainer.run_spec.stage,
        stages=_stage_rows(trainer) if recipe.is_in_stages else (),
        busy=trainer.computing.busy if isinstance(trainer.computing, StageComputing) else None,
    )


@dataclass(frozen=True, slots=True)
class _Holder:
    """Who holds a stage, how far it is, and how many samples/s it computes while it waits for nothing."""

    peer: str
    epoch: int
    n_samples: int
    passes_per_s: float


def _find_holders(trainer: Trainer) -> dict[int, list[_Holder]]:
    """Find who holds each stage of a run, as records say and this trainer knows of itself."""
    run = trainer.run_spec
    holders: dict[int, list[_Holder]] = {part.stage: [] for part in run.stages if part.stage is not None}
    for r in trainer.services.view().in_run(run.whole):
        is_own = r.peer == trainer.me and r.run == run.id
        if r.role == "train" and r.stage in holders and not is_own:
            holders[r.stage].append(_Holder(r.peer, r.epoch, r.n_samples, r.passes_per_s))
    if trainer.role == "train" and run.stage is not None:
        me = trainer.record()
        holders[run.stage].append(_Holder(trainer.me, me["epoch"], me["n_samples"], me["passes_per_s"]))
    return holders


def _stage_rows(trainer: Trainer) -> tuple[StageRow, ...]:
    """Say how far each stage of a run is, and who holds it."""
    rows = []
    borders = (*trainer.run_spec.recipe.first_blocks, None)
    for stage, holders in _find_holders(trainer).items():
        is_ends = stage == ENDS
        rows.append(
            StageRow(
                stage=stage,
                first_block=None if is_ends else borders[stage - 1],
                end_block=None if is_ends else borders[stage],
                update=max((holder.epoch for holder in holders), default=0),
                samples=sum(holder.n_samples for holder in holders),
                holders=tuple(sorted(holder.peer for holder in holders)),
                samples_per_s=sum(holder.passes_per_s for holder in holders),
            )
        )
    return tuple(rows)


def _member_rows(trainer: Trainer, now: float) -> tuple[RunPeerRow, ...]:
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


def _audit_row(trainer: Trainer) -> AuditsRow:
    audits = trainer.audits
    one_in = trainer.run_spec.recipe.audit
    return AuditsRow(
        one_in=one_in,
        why_not=audits.why_not,
        trouble=audits.accusations.trouble,
        **asdict(audits.counts),
    )


def plan_round(trainer: Trainer, peers: Mapping[PeerId, PeerRecord]) -> PlanAnswer:
    """Plan who would do what in the next round, and what each way of training would come to. Raises ConfigError."""
    recipe = trainer.run_spec.recipe
    codec = codec_of(recipe)
    records = trainer.members.look(trio.current_time())
    if trainer.state is None:
        raise ConfigError("the model is not loaded here yet: try again soon, or on a peer that trains")
    up, down = trainer.services.links()
    own_member = PartitionMember(
        trainer.me, can_reduce=trainer.services.can_be_dialled(), up_bytes_per_s=up, down_bytes_per_s=down
    )
    members = [own_member]
    speeds = [trainer.computing.workload.samples_per_s]
    for peer, record in records.items():
        if record.role == "anchor":
            continue
        peer_record = peers.get(peer)
        computes = record.role == "train"
        members.append(
            PartitionMember(
                peer,
                contributes=computes,
                receives=computes,
                can_reduce=record.can_be_dialled,
                up_bytes_per_s=peer_record.up_bytes_per_s if peer_record else None,
                down_bytes_per_s=peer_record.down_bytes_per_s if peer_record else None,
            )
        )
        speeds.append(record.samples_per_s)
    sizes = codec.sizes(trainer.state.n_averaged, sum(m.contributes for m in members))
    try:
        decision = partition.divide_vector(members, sizes)
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
    speeds = _subtract_audits(trainer, [m.peer for m in members], speeds)
    own_prediction, predicted = predict_settings(recipe, members, speeds, trainer.state.layout.n_elements)
    chosen = choose_setting(predicted) if predicted else None
    reason = chosen.reason if chosen else "it is not known yet how fast anybody computes"
    price = recipe.optimizer.price_of_delay
    if chosen and price and chosen.action.setting.synchronisation == "delayed":
        reason = f"{reason}; {price}"
    trainer.pace.predicted = own_prediction.samples_per_s if own_prediction else None
    return PlanAnswer(
        run=trainer.run_spec.id,
        bytes=sizes.contribution,
        expected_s=decision.action.expected_s,
        equal_parts_s=partition.plan_equal_parts(members, sizes).expected_s,
        why=decision.reason,
        members=rows,
        setting=str(own_prediction.setting) if own_prediction else "",
        settings=tuple(_setting_row(p) for p in predicted),
        recommended=str(chosen.action.setting) if chosen else "",
        recommended_why=reason,
    )


def plan_stages(trainers: Sequence[Trainer]) -> PlanAnswer:
    """Say what a run in stages comes to with the holders that it has; ``trainers``: those of its stages here."""
    first = trainers[0]
    speeds = {stage: [holder.passes_per_s for holder in holders] for stage, holders in _find_holders(first).items()}
    forecast = forecast_pipeline(speeds)
    parts = [trainer.stage.computing for trainer in trainers if trainer.stage is not None]
    return PlanAnswer(
        run=first.run_spec.whole,
        pipeline=PipelineRow(
            stages=_stage_rows(first),
            **asdict(forecast),
            sample_bytes=len(speeds) * max((part.sample_bytes for part in parts), default=0.0),
        ),
    )


def _subtract_audits(
    trainer: Trainer,
    peers: Sequence[PeerId],
    speeds: Sequence[float],
) -> list[float]:
    """Compute what is left of speeds for one's own samples, where members compute again what others gave."""
    if trainer.audits.why_not:
        return list(speeds)
    computing = {peer: speed for peer, speed in zip(peers, speeds, strict=True) if speed > 0}
    n_right = {PeerId(peer): n for peer, n in trainer.ledger.n_contributions.items()}
    audited = gradient_audits.expected_rechecks(n_right, computing, trainer.run_spec.recipe.audit)
    # Of each second a member computes s samples; for s own ones it audits a, and both take (s + a) / s seconds.
    remaining = []
    for peer, speed in zip(peers, speeds, strict=True):
        remaining.append(speed * speed / (speed + audited[peer]) if speed > 0 else 0.0)
    return remaining


def _setting_row(predicted: Prediction) -> PlanSettingRow:
    return PlanSettingRow(
        setting=str(predicted.setting),
        update_s=predicted.update_s,
        utilisation=predicted.utilisation,
        excess=predicted.excess,
        samples_per_s=predicted.samples_per_s,
        bytes_per_sample=predicted.bytes_per_sample,
    )
