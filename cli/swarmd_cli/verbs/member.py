"""Verbs of membership: found a swarm, invite, join, leave, run the daemon, stop it."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmd.values import count
from swarmd_cli.context import (
    INTERRUPTED,
    ask,
    ask_json,
    find_peers,
    founder,
    home,
    is_running,
    membership,
    reload_daemon,
    wait_until,
)
from swarmd_cli.preflight import explain_waiting
from swarmd_cli.streams import tell

if TYPE_CHECKING:
    from swarmd.protocol.membership.catalog import Catalog
    from swarmd.protocol.membership.invite import Invite

MEET_S = 30.0  # a dial that nobody answers is given up after 5 s, an exchange after as many
MOST_INVITE_CHARACTERS = 65_536  # of a line that is read: eight addresses, keys and charters take some thousand


def init(
    name: Annotated[str, typer.Option("--name", help="What to call the swarm.")],
) -> None:
    """Found a private swarm on this machine and print an invite.

    Example: swarmd init --name ours
    """
    from swarmd.names import require_name

    require_name("a swarm", name)
    state = home()
    founder().found(name)
    print(f"Founded the swarm {name!r} in {state.folder}.", file=sys.stderr)
    print("Start this machine's daemon with: swarmd up", file=sys.stderr)
    print("One other machine joins with this invite (within 7 days; swarmd invite makes more):", file=sys.stderr)
    print(_new_invite(7.0, 1))


def invite(
    days: Annotated[float, typer.Option("--days", help="How long the invite lets people in.")] = 7.0,
    uses: Annotated[int, typer.Option("--uses", min=0, help="For so many machines; 0 is any number.")] = 1,
    approve: Annotated[
        bool, typer.Option("--approve", help="Who comes waits until you say swarmd members approve.")
    ] = False,
    may: Annotated[str, typer.Option("--may", metavar="WORDS", help="What for: use,serve,train,give.")] = "",
    revoke: Annotated[
        str,
        typer.Option(
            "--revoke", metavar="INVITE", help="Revoke an invite, or its id in members ls, and all it let in."
        ),
    ] = "",
) -> None:
    """Print an invite to this swarm for one machine, or revoke one. Only a founder can.

    Who joins by it stays a member for a year; with --uses 0, as long as the invite lasts, up to 128 at a time.

    Example: swarmd invite --uses 3 --days 1
    """
    if revoke:
        _revoke(revoke)
    else:
        print(_new_invite(days, uses, approve, parse_rights(may)))
        if not is_running():
            print("the daemon is down: others learn what this invite is for when it is up again", file=sys.stderr)


def parse_rights(words: str) -> tuple[Any, ...]:
    """Parse what --may says; everything where it says nothing. Raises ConfigError."""
    from swarmd.config import split
    from swarmd.errors import ConfigError
    from swarmd.protocol.membership.catalog import RIGHTS

    chosen = split(words)
    unknown = [word for word in chosen if word not in RIGHTS]
    if unknown:
        raise ConfigError(f"--may takes {', '.join(RIGHTS)}, comma-separated, not {unknown[0]!r}")
    return tuple(word for word in RIGHTS if word in chosen) if chosen else RIGHTS


def join(
    text: Annotated[
        str,
        typer.Argument(
            metavar="[INVITE]",
            show_default=False,
            help="The line that swarmd invite printed; - or nothing: asks for it.",
        ),
    ] = "-",
) -> None:
    """Join a swarm by an invite: one that is pasted, or piped in, stands in no process list and no shell history.

    A member takes the addresses in a fresh invite to its swarm, or addresses themselves, as new ways to the others.

    Example: swarmd join
    """
    import trio

    from swarmd.errors import ConfigError
    from swarmd.home.membership import by_peer
    from swarmd.node.members.checkin import check_in
    from swarmd.protocol.membership import addresses
    from swarmd.protocol.membership import invite as invites
    from swarmd.protocol.membership.catalog import MEMBERSHIP_LIFETIME_S
    from swarmd.protocol.membership.identity import Identity

    # Identity and certificate are written to disk only once another member has answered (``enter``): a join that
    # failed leaves nothing behind, and the invite can be tried again.
    state = home()
    if state.has_joined and addresses.looks_like_address(text):
        _meet(addresses.read_addresses_untrusted(text))
        return
    ticket = _read_invite() if text == "-" else invites.decode_untrusted(text, time.time())
    if state.has_joined:
        keys = membership().swarm().keys
        if ticket.swarm.founder_key != keys.founder_key:
            raise ConfigError(f"{state.folder} is a member of {keys.name!r} already: swarmd leave first")
        _meet(ticket.addresses)
        return
    identity = Identity.generate()
    certificate = ticket.admit(identity.public_key, "member", int(time.time()) + MEMBERSHIP_LIFETIME_S)
    answer = trio.run(check_in, ticket.swarm, identity, certificate, by_peer(ticket.addresses))
    membership().enter(ticket, identity, answer.catalog)
    if answer.wrong_clock:
        print(answer.wrong_clock, file=sys.stderr)
    if answer.waits:
        print(f"Asked to join the swarm {ticket.swarm.name!r} as {identity.peer_id}.")
        print(f"A founder lets this machine in with: swarmd members approve {identity.peer_id[-8:]}")
        print("Start its daemon now or then with: swarmd up")
        return
    print(f"Joined the swarm {ticket.swarm.name!r} as {identity.peer_id}.")
    print("Start this machine's daemon with: swarmd up")


def _meet(addresses: tuple[str, ...]) -> None:
    """Take addresses of other members as ways into the swarm, whose member this is; nothing else changes."""
    from swarmd.errors import ConfigError
    from swarmd.home.membership import by_peer
    from swarmd.node.members.address_memory import AddressMemory
    from swarmd.status import MeetAnswer

    member = membership()
    name = member.swarm().keys.name
    me = member.identity().peer_id
    others = tuple(address for address in addresses if not address.endswith(f"/p2p/{me}"))
    if not others:
        print(f"This machine is a member of {name!r} already, and that names no other member: nothing was changed.")
        return
    taken = f"This machine is a member of {name!r} already: it takes {count(len(others), 'way')} to others"
    if not is_running():
        memory = AddressMemory(by_peer(member.swarm().bootstrap), home().peers_file, me)
        if not memory.add(by_peer(others)):
            raise ConfigError(f"{home().peers_file} cannot be written: the addresses are not kept")
        print(f"{taken}, and tries them when its daemon starts: swarmd up")
        return
    answer = ask(MeetAnswer, "meet", "POST", MEET_S, addresses=",".join(others))
    if answer.answered:
        print(f"{taken}; {len(answer.answered)} of {count(len(answer.tried), 'member')} answered.")
    else:
        print(f"{taken}. Nobody answers there yet; its daemon goes on trying: swarmd doctor")


def _read_invite() -> Invite:
    """Read an invite, perhaps broken over lines, from a terminal or a pipe. Raises ConfigError where there is none."""
    from swarmd.errors import ConfigError
    from swarmd.protocol.membership import invite as invites
    from swarmd.protocol.membership.lines import CutShortError

    is_typed = sys.stdin.isatty()
    prompt = "The invite: "
    text = ""
    while len(text) < MOST_INVITE_CHARACTERS:
        if is_typed:
            print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline(MOST_INVITE_CHARACTERS)
        text += line
        if not line.strip():
            break
        try:
            return invites.decode_untrusted(text, time.time())
        except CutShortError:
            prompt = "... and its next line (an empty one ends it): "
        except ConfigError:
            if is_typed or invites.has_begun(text):
                raise
    if not text.strip():
        raise ConfigError(
            "expected an invite on standard input, got nothing: paste the line that swarmd invite printed"
        )
    return invites.decode_untrusted(text, time.time())


def leave(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask, even where the founder's key goes with it.")] = False,
) -> None:
    """Leave the swarm: forget its keys and this machine's identity.

    Example: swarmd leave
    """
    from swarmd.errors import ConfigError

    state = home()
    member = membership()
    name = member.swarm().keys.name
    if is_running():
        raise ConfigError("the daemon is running: swarmd down first")
    if founder().is_here and not yes:
        _confirm_loss_of_founder_key(name, state.folder / "founder.key")
    member.leave()
    print(f"Left the swarm {name!r}. Settings and added models are still in {state.folder}.")


def _confirm_loss_of_founder_key(swarm: str, key: Path) -> None:
    """Ask before what nobody can undo. Raises ConfigError when the answer is no, or nobody is there to give it."""
    from swarmd.errors import ConfigError

    loss = f"this machine founded {swarm!r}: without {key} nobody can invite, revoke or add models there any more"
    keep = f"to keep a copy: cp {key} SOMEWHERE-SAFE"
    if not sys.stdin.isatty():
        raise ConfigError(f"{loss}; {keep}; then swarmd leave --yes")
    print(f"{loss[0].upper()}{loss[1:]}.\n{keep[0].upper()}{keep[1:]}", file=sys.stderr)
    if not typer.confirm("Delete it for good?", err=True):
        raise ConfigError("nothing was deleted")


def up(
    listen: Annotated[str | None, typer.Option(help="Address to listen on, as a multiaddr.")] = None,
    serve: Annotated[
        list[str] | None, typer.Option(metavar="MODEL", help="Serve this model; several times: each by its own worker.")
    ] = None,
    blocks: Annotated[str | None, typer.Option(metavar="A:B", help="Serve blocks A to B (exclusive).")] = None,
    no_serve: Annotated[bool, typer.Option("--no-serve", help="Only help others find each other.")] = False,
    announce: Annotated[str | None, typer.Option(help="Address to give to others instead.")] = None,
    name: Annotated[
        str | None, typer.Option(help="What to tell members that this machine is called; '' is none.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more of what happens.")] = False,
) -> None:
    """Run the daemon in the foreground. Without flags it serves the least-covered blocks that fit.

    Example: swarmd up --listen /ip4/0.0.0.0/tcp/4117 --serve demo --blocks 0:3
    """
    signal.signal(signal.SIGINT, _leave_at_once)  # until the daemon listens to signals itself
    import trio

    from swarmd import config, daemon, logs

    state = home()
    settings = config.load(
        state.folder,
        listen=listen,
        model=",".join(serve) if serve else None,
        blocks=blocks,
        announce=announce,
        name=name,
        serve=False if no_serve else None,
    )
    membership().swarm()
    logs.configure(settings.log_format, verbose)

    def ready(running: daemon.Daemon) -> None:
        tell(f"swarmd is up as {running.network.peer_id}")
        for address in running.network.addresses():
            tell(f"  {address}")
        if waiting := explain_waiting():
            tell(f"{waiting}; it serves nothing before", sys.stderr)
        if sys.stdout.isatty():
            tell("what it does: swarmd status; for good, after logging out too: swarmd service install; stop: Ctrl-C")

    trio.run(daemon.main, state, settings, ready)


def _leave_at_once(number: int, frame: object) -> None:
    """End a daemon that has not begun: Python loses an interrupt that is raised in the midst of some imports."""
    print("swarmd: interrupted", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


Served = Annotated[str, typer.Argument(metavar="[MODEL]", help="Only this one of the models that are served here.")]


def drain(model: Served = "") -> None:
    """Stop serving: live sessions are taken over by other servers. The daemon stays a member; see resume.

    Example: swarmd drain
    """
    from swarmd.status import DaemonStatus, DrainAnswer

    answer = ask(DrainAnswer, "drain", "POST", model=model)
    print(f"draining: {count(answer.sessions, 'session')} to be taken over", flush=True)

    def is_drained() -> bool:
        daemon_status = ask(DaemonStatus, "status")
        serving = [hosting.serving for hosting in daemon_status.hosting if hosting.serving]
        if not model:
            return not serving
        hash_of_name = {row.name: row.model for row in daemon_status.models}
        model_hash = hash_of_name.get(model, model)
        return all(model_hash != served.model and model != served.name for served in serving)

    is_done = wait_until(is_drained)
    print("drained; swarmd resume serves again" if is_done else "the daemon is still at it: swarmd status")


def resume(model: Served = "") -> None:
    """Serve again after a drain or a pause.

    Example: swarmd resume
    """
    from swarmd.status import ResumeAnswer

    answer = ask(ResumeAnswer, "resume", "POST", model=model)
    why_not = answer.policy.why if answer.policy else ""
    print("serving again: swarmd status" if answer.serving else f"not yet: {why_not}")


def down() -> None:
    """Stop the daemon, after other servers have taken over its live sessions.

    Example: swarmd down
    """
    ask_json("down", "POST")
    is_done = wait_until(lambda: not home().socket.exists())
    print("stopped" if is_done else "the daemon was told to stop and is still at it")


def _new_invite(
    days: float,
    uses: int,
    waits: bool = False,
    may: tuple[Any, ...] | None = None,
) -> str:
    from swarmd.errors import ConfigError
    from swarmd.protocol.membership import invite as invites
    from swarmd.protocol.membership.catalog import MAX_USES, RIGHTS

    if not 0 < days <= 3650:
        raise ConfigError(f"--days takes a number above 0 and up to 3650, not {days:g}")
    if uses > MAX_USES:
        raise ConfigError(f"--uses takes 1 to {MAX_USES}, or 0 for any number, not {uses}")
    lifetime_s = int(days * 86_400)
    addresses = _invite_addresses()
    new_invite = founder().invite(addresses, lifetime_s, uses, waits, may or RIGHTS)
    _warn_of_addresses(addresses)
    reload_daemon()
    return invites.encode(new_invite)


def _invite_addresses() -> tuple[str, ...]:
    """Choose the addresses of an invite: the daemon's and those of other live members, else a guess."""
    from swarmd import config
    from swarmd.errors import DaemonNotRunning
    from swarmd.status import AddressesAnswer

    state = home()
    try:
        by_peer = ask(AddressesAnswer, "addresses").addresses
        return tuple(address for addresses in by_peer.values() for address in addresses[:2])[:8]
    except DaemonNotRunning:
        from swarmd.net.interfaces import expand_wildcards

        settings = config.load(state.folder)
        chosen = config.split(settings.announce) or expand_wildcards(config.split(settings.listen))
        own_peer = membership().identity().peer_id
        return tuple(f"{address.split('/p2p/')[0]}/p2p/{own_peer}" for address in chosen)


def _warn_of_addresses(addresses: tuple[str, ...]) -> None:
    """Say so where nobody on another machine can join by an invite with these."""
    from swarmd.net.interfaces import is_loopback

    remedy = "connect it to a network, or have it listen on more (listen in config.toml); then swarmd invite"
    if not addresses:
        print(f"nobody can join by this invite: this machine listens nowhere; {remedy}", file=sys.stderr)
    elif is_loopback(addresses):
        named = ", ".join(dict.fromkeys(address.split("/")[2] for address in addresses))
        only = f"it names this machine's loopback only ({named})"
        print(f"nobody on another machine can join by this invite: {only}; {remedy}", file=sys.stderr)


def _revoke(text: str) -> None:
    import msgspec

    key = _invite_key(text)

    def revoke(catalog: Catalog) -> Catalog:
        return msgspec.structs.replace(catalog, revoked=tuple({*catalog.revoked, key}))

    founder().change_catalog(revoke)
    reload_daemon()
    print("Revoked the invite and every membership that came from it.")


def _invite_key(text: str) -> bytes:
    """Find the key of an invite, named by its line or by how its id begins (in members ls). Raises ConfigError."""
    from swarmd.errors import ConfigError
    from swarmd.protocol.membership import invite as invites

    founder().key()
    if not re.fullmatch(r"[0-9a-f]{4,64}", text):
        return invites.decode_untrusted(text, 0.0).identity.public_key
    # An id may stand in the catalog, in the record of a member that it admitted, or in the certificate of a peer that
    # is here: an invite can be revoked though the catalog never listed it.
    catalog = membership().catalog()
    answer = find_peers()
    seen_sponsors = {peer.voucher for peer in answer.peers} | {guest.voucher for guest in answer.waiting}
    admitted = {entry.invite.hex() for entry in catalog.admitted.values()}
    invited = {key.hex() for key in catalog.invites}
    known = sorted((invited | admitted | seen_sponsors) - {""})
    matches = [bytes.fromhex(key) for key in known if key.startswith(text)]
    if len(matches) != 1:
        ids = ", ".join(key[:8] for key in known) or "none"
        raise ConfigError(f"{len(matches)} invites have an id that begins with {text!r}; there are: {ids}")
    return matches[0]
