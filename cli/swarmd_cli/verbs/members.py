"""Verbs on members: who is there and by whose invite, and turning one of them away for good."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from swarmd.names import label_member
from swarmd_cli.context import find_peers, founder, membership, print_json, reload_daemon
from swarmd_cli.terminal import print_table
from swarmd_cli.verbs.look import Json, span_text

if TYPE_CHECKING:
    from swarmd.member_status import PeerRow, SpanRow
    from swarmd.protocol.membership.catalog import Catalog

_FOREVER_S = 2**40  # seconds: no end

app = typer.Typer(
    help="Members of the swarm: who brought them in, what they may do, how they compute; let in, turn away.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("ls")
def ls(as_json: Json = False) -> None:
    """List the members, by the invite that brought them in; open invites, and who waits to be let in.

    Members are those that are here, and those that a founder admitted for good. What others found of their blocks is
    by probes. Without the daemon only what the catalog says is known.

    Example: swarmd members ls
    """
    answer = find_peers()
    catalog = membership().catalog()
    members = [_describe_present(peer) for peer in answer.peers] + _absent_members(catalog, answer.peers)
    members.sort(key=lambda member: (member.voucher, member.peer))
    invites = _open_invites(catalog)
    if as_json:
        keys = ("peer", "name", "is_self", "is_here", "voucher", "may", "ends_at", "found_right", "found_wrong")
        rows = [{key: getattr(member, key) for key in keys} for member in members]
        waiting_here = msgspec.to_builtins(answer.waiting)
        print_json({"members": rows, "waiting": waiting_here, "invites": [asdict(invite) for invite in invites]})
        return
    columns = ["member", "brought in by", "may", "until", "serves", "its blocks were found"]
    print_table("Members", columns, [_member_row(row) for row in members])
    if invites:
        invites.sort(key=lambda invite: invite.ends_at)
        print_table("Open invites", ["invite", "used", "for", "until"], [_invite_row(row) for row in invites])
    if answer.waiting:
        waiting = sorted(answer.waiting, key=lambda guest: -guest.knocked_s)
        waiting_rows = [
            [guest.peer[-8:], _sponsor_text(guest.voucher), f"{guest.knocked_s:.0f} s ago"] for guest in waiting
        ]
        print_table("Waiting: swarmd members approve PEER", ["who", "brought in by", "knocked"], waiting_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedMember:
    """A member as ``members ls`` lists it, here or away."""

    peer: str
    is_self: bool
    is_here: bool
    voucher: str
    may: tuple[str, ...]
    ends_at: int
    found_right: int = 0
    found_wrong: int = 0
    spans: tuple[SpanRow, ...] = ()
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedInvite:
    """An invite that still lets somebody in, and how many have used it."""

    voucher: str
    uses: int
    waits: bool
    may: tuple[str, ...]
    ends_at: int
    used: int


def _open_invites(catalog: Catalog) -> list[ListedInvite]:
    """List the invites that still let somebody in."""
    invites = []
    for key, terms in catalog.invites.items():
        if terms.ends_at <= time.time() or key in catalog.revoked:
            continue
        invites.append(
            ListedInvite(
                voucher=key.hex(),
                uses=terms.uses,
                waits=terms.waits,
                may=terms.may,
                ends_at=terms.ends_at,
                used=sum(entry.invite == key for entry in catalog.admitted.values()),
            )
        )
    return invites


def _describe_present(peer: PeerRow) -> ListedMember:
    return ListedMember(
        peer=peer.peer,
        is_self=peer.is_self,
        is_here=True,
        voucher=peer.voucher,
        may=peer.may,
        ends_at=peer.ends_at,
        found_right=peer.found_right,
        found_wrong=peer.found_wrong,
        spans=peer.spans,
        name=peer.name,
    )


def _absent_members(catalog: Catalog, peers_here: Iterable[PeerRow]) -> list[ListedMember]:
    """List the members that were admitted and are not here now."""
    from swarmd.protocol.membership.identity import peer_id_of

    present = {peer.peer for peer in peers_here}
    absent = []
    for key, entry in catalog.admitted.items():
        if key in catalog.revoked:
            continue
        peer = str(peer_id_of(key))
        if peer in present:
            continue
        voucher = entry.invite.hex()
        absent.append(
            ListedMember(peer=peer, is_self=False, is_here=False, voucher=voucher, may=entry.may, ends_at=entry.ends_at)
        )
    return absent


def _member_row(member: ListedMember) -> list[str]:
    serves = ", ".join(f"{span.model} {span_text(span.blocks)}" for span in member.spans) or "nothing"
    return [
        label_member(member.peer, {member.peer: member.name}) + (", this one" if member.is_self else ""),
        _sponsor_text(member.voucher),
        ", ".join(member.may),
        _until_text(member.ends_at),
        serves if member.is_here else "not here",
        _findings_text(member),
    ]


def _invite_row(invite: ListedInvite) -> list[str]:
    may = ", ".join(invite.may)
    return [invite.voucher[:8], _uses_text(invite), may, _until_text(invite.ends_at)]


def _uses_text(invite: ListedInvite) -> str:
    uses = f"{invite.used} of {invite.uses}" if invite.uses else f"{invite.used}, any number"
    return uses + (", each waits" if invite.waits else "")


def _sponsor_text(voucher: str) -> str:
    return f"invite {voucher[:8]}" if voucher else "a founder"


def _until_text(ends_at: int) -> str:
    from datetime import datetime

    return datetime.fromtimestamp(ends_at).strftime("%Y-%m-%d") if ends_at < _FOREVER_S else "for ever"


@app.command("approve")
def approve(
    peer: Annotated[str, typer.Argument(metavar="PEER", help="Who waits, by the end of its id; or any id in full.")],
    may: Annotated[str, typer.Option("--may", metavar="WORDS", help="What for: use,serve,train,give.")] = "",
    days: Annotated[int, typer.Option("--days", min=1, max=365, help="For so many days.")] = 365,
) -> None:
    """Let in for good who waits, or change what a member may do, and until when. Only a founder can.

    Example: swarmd members approve 8auXSk2p --may use,serve
    """
    from swarmd.errors import ConfigError
    from swarmd.protocol.membership.catalog import AdmittedMember
    from swarmd.protocol.membership.identity import public_key_of_untrusted
    from swarmd_cli.verbs.member import parse_rights

    # What the member may do: as the words say, else as it was admitted before, else as its invite says.
    founder().key()
    peer_id, voucher = _find_member(peer)
    key = public_key_of_untrusted(peer_id)
    catalog = membership().catalog()
    known = catalog.admitted.get(key)
    invite = known.invite if known is not None else bytes.fromhex(voucher)
    template = known or catalog.invites.get(invite)
    if not may and template is None and not voucher:
        raise ConfigError("it is not known here what it was invited for: say so with --may use,serve,train,give")
    granted = parse_rights(may) if may or template is None else template.may
    ends_at = int(time.time()) + days * 86_400
    founder().admit({key: AdmittedMember(ends_at, invite, granted)})
    reload_daemon()
    print(f"{peer_id} is a member for {days} days, and may {', '.join(granted)}.")


@app.command("order")
def order(
    rule: Annotated[str, typer.Argument(metavar="[RULE]", help="equal, giving or key; nothing shows it.")] = "",
) -> None:
    """Say who goes first where cache or a queue is short. Only a founder can change it.

    equal: everybody alike. giving: each server favours who computed for its owner, and nobody starves. key: as
    swarmd members favour says.

    Example: swarmd members order giving
    """
    from swarmd.errors import ConfigError
    from swarmd.plan.trust.order import ORDERS

    if not rule:
        catalog = membership().catalog()
        print(catalog.order)
        for key, times in catalog.favours.items():
            print(f"  {key.hex()}  {times}")
        return
    if rule not in ORDERS:
        raise ConfigError(f"an order is one of {', '.join(ORDERS)}, not {rule!r}")
    _change_catalog(lambda catalog: msgspec.structs.replace(catalog, order=rule))
    print(f"Where something is short, the order is: {rule}.")


@app.command("favour")
def favour(
    peer: Annotated[str, typer.Argument(metavar="PEER", help="A member, by the end of its id.")],
    times: Annotated[int, typer.Argument(min=1, max=16, help="So many times what others get; 1 is as others.")],
    guests: Annotated[bool, typer.Option("--guests", help="And all whom its invite brought in, together.")] = False,
) -> None:
    """Give a member more of what is short, in swarms whose order is by key. Only a founder can.

    Example: swarmd members favour 8auXSk2p 4
    """
    peer_id, voucher = _find_member(peer)
    key = _key_to_change(peer_id, voucher, guests)
    favours = dict(membership().catalog().favours)
    favours.pop(key, None)
    if times > 1:
        favours[key] = times
    _change_catalog(lambda catalog: msgspec.structs.replace(catalog, favours=favours))
    if membership().catalog().order != "key":
        print("It counts once the order is by key: swarmd members order key")


def _change_catalog(change: Callable[[Any], Any]) -> None:
    founder().key()
    founder().change_catalog(change)
    reload_daemon()


def _key_to_change(peer: str, voucher: str, guests: bool) -> bytes:
    """Find the key of a member, or of the invite that brought it in. Raises ConfigError."""
    from swarmd.errors import ConfigError
    from swarmd.protocol.membership.identity import public_key_of_untrusted

    if guests and not voucher:
        raise ConfigError("no invite is known that brought it in: do without --guests")
    return bytes.fromhex(voucher) if guests else public_key_of_untrusted(peer)


def _find_member(ending: str) -> tuple[str, str]:
    """Find the member that is meant, and whose invite it came by, as far as is known. Raises ConfigError."""
    from swarmd.errors import ConfigError, IntegrityError
    from swarmd.protocol.membership.identity import public_key_of_untrusted

    answer = find_peers()
    away = _absent_members(membership().catalog(), answer.peers)
    known = {known_peer.peer: known_peer.voucher for known_peer in answer.peers}
    known |= {member.peer: member.voucher for member in away}
    known |= {guest.peer: guest.voucher for guest in answer.waiting}
    matches = [peer for peer in known if ending and peer.endswith(ending)]
    if len(matches) == 1:
        return matches[0], known[matches[0]]
    try:
        public_key_of_untrusted(ending)
    except IntegrityError:
        text = f"{len(matches)} members, or who wait, have an id that ends in {ending!r}: see swarmd members ls"
        raise ConfigError(text) from None
    return ending, ""


def _findings_text(member: ListedMember) -> str:
    if not member.found_right and not member.found_wrong:
        return "not probed"
    findings = {"right": member.found_right, "WRONG": member.found_wrong}
    return ", ".join(f"{n} x {word}" for word, n in findings.items() if n)


@app.command("revoke")
def revoke(
    peer: Annotated[str, typer.Argument(metavar="PEER", help="A member, or who waits, by the end of its id.")],
    guests: Annotated[
        bool, typer.Option("--guests", help="Everybody else, too, whom the same invite brought in.")
    ] = False,
) -> None:
    """Turn a member away for good: its sessions and connections end wherever the news comes. Only the founder can.

    Example: swarmd members revoke 8auXSk2p --guests
    """
    from swarmd.errors import ConfigError

    founder().key()
    peer_id, voucher = _find_member(peer)
    if peer_id == membership().identity().peer_id:
        raise ConfigError("this machine itself: swarmd leave takes it out of the swarm")
    key = _key_to_change(peer_id, voucher, guests)

    def revoke_key(catalog: Any) -> Any:
        revoked = {*catalog.revoked, key}
        return msgspec.structs.replace(catalog, revoked=tuple(revoked))

    _change_catalog(revoke_key)
    print(f"Revoked {peer_id}" + (" and everybody whom its invite brought in." if guests else "."))
