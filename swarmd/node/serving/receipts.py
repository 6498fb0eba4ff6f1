"""A server's receipts: what passed through a hop, signed for its client, and shown to it again when it asks.

What is signed is ``protocol.accounts.receipt``'s; what clients do with it is ``client.sessions.audit``'s. docs/trust.md
tells the story.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from swarmd.errors import Code, Forged, IntegrityError, Refused
from swarmd.net.exchange import Exchange
from swarmd.net.tasks import Tasks
from swarmd.node.serving.hops import Key
from swarmd.node.serving.outbox import Outbox
from swarmd.node.serving.served import ServedBlocks
from swarmd.node.worker.worker_link import WorkerLink, WorkerLost, WorkerReply
from swarmd.plan.chains.hop import SessionHop
from swarmd.protocol.accounts import receipt, usage_receipt
from swarmd.protocol.accounts.receipt import Receipt, Trail, Waiting
from swarmd.protocol.accounts.usage_receipt import SignedUsageReceipt, UsageReceipt
from swarmd.protocol.fields import TensorMeta
from swarmd.protocol.wire.messages import (
    OpenSession,
    ReceiptIs,
    Refusal,
    Taken,
    TokensAre,
    WantReceipt,
    WantTokens,
    encode_frame,
)
from swarmd.values import PeerId

MOST_DIGESTED_BYTES = 16 * 2**20  # beside the rest: who waits for digests waits for those before, 30 ms
OPS_INTERVAL = 32  # ops that one receipt is for: a signature costs 0.1 ms, a digest 5 us


# A hop's trail collects a digest of each token that enters and leaves it. Every OPS_INTERVAL ops the digests are cut
# off, signed and sent to the client, with a hash of all digests before them. So a server that later says that it
# computed something else contradicts its own signature. A client signs a bill and sends it back (``taken``), and this
# server signs the same body: so a bill for more tokens than the trail has computed is refused.
class Receipts:
    """Those of one server. ``outbox`` reaches clients."""

    def __init__(
        self, exchange: Exchange, served: ServedBlocks, worker: WorkerLink, outbox: Outbox, tasks: Tasks
    ) -> None:
        self._exchange = exchange
        self._served = served
        self._worker = worker
        self._outbox = outbox
        self._tasks = tasks
        self._digesting = ThreadPoolExecutor(1, "digests")
        self._under_way: list[tuple[Future[bytes], int]] = []  # and of how many bytes

    def trail(self, opening: OpenSession) -> Trail | None:
        """What receipts of a session will be made of; None where its client wants none."""
        loaded = self._worker.loaded
        if loaded is None or not opening.receipts:
            return None
        shape = (opening.batch, loaded.hidden)
        is_heir = bool(opening.inherit)
        return Trail(
            shape=shape, adapter=opening.adapter, tuned=opening.tuned, is_heir=is_heir, later=self._begin_digests
        )

    def _begin_digests(self, work: Callable[[], bytes], n_bytes: int) -> Waiting:
        """Have digests computed in a thread, while the tokens go on their way; at once where much waits for that."""
        self._under_way = [(digests, n) for digests, n in self._under_way if not digests.done()]
        if sum(n for _, n in self._under_way) + n_bytes > MOST_DIGESTED_BYTES:
            return receipt.at_once(work, n_bytes)
        digests = self._digesting.submit(work)
        self._under_way.append((digests, n_bytes))
        return digests.result

    def note_output(
        self,
        key: Key,
        hop: SessionHop,
        seq: int,
        tensor: TensorMeta | None,
        payload: memoryview,
        n_alternative: int = 0,
    ) -> None:
        """An op has left a hop, or ended in it without output; ``n_alternative``: see ``Trail.leave``."""
        if hop.trail is None:
            return
        hop.trail.leave(seq, tensor, payload, n_alternative)
        if hop.trail.n_ops >= OPS_INTERVAL and not hop.trail.is_broken:
            self._outbox.tell(hop.state.client, self._signed(key, hop))

    def accept_bill(self, hop: SessionHop, message: Taken, body: bytes) -> None:
        """The client has signed a bill that it was given. Raises RemoteProtocolError."""
        identity = self._served.identity
        try:
            bill = usage_receipt.read_body_untrusted(body)
            is_ours = (bill.giver, bill.taker) == (identity.peer_id, hop.state.client)
            is_session = bill.session == message.session
            is_hop = (bill.start, bill.end) == (hop.span.start, hop.span.end)
            if not (is_ours and is_session and is_hop):
                raise IntegrityError("a bill of another session")
            if hop.trail is None or bill.n_tokens > hop.trail.taken.n_owed:
                raise IntegrityError(f"a bill for {bill.n_tokens} tokens, more than were taken")
            usage_receipt.verify_taken_untrusted(bill, body, message.taken)
        except IntegrityError as error:
            raise Forged(str(error)) from None
        own_signature = usage_receipt.giver_signature_of(identity, body)
        hop.bill = (bill, SignedUsageReceipt(body, own_signature, message.taken))

    def settle(self, hop: SessionHop) -> None:
        """A session is over: what it came to goes into the books."""
        if hop.bill is not None:
            bill, signed = hop.bill
            self._served.books.add(bill, signed, self._exchange.roster.voucher_of(hop.state.client))

    async def answer(self, hop: SessionHop, request: WantReceipt | WantTokens) -> None:
        """Sign now what has passed since the last receipt, or have the worker show it. Raises Refused, WorkerLost."""
        if isinstance(request, WantTokens):
            answer = await self._worker.ask(request)
            self._tasks.start_soon(self._pass_on, hop.state.client, request, answer)
            return
        if hop.trail is None or hop.trail.is_broken:
            raise Refused(Code.NOT_HELD, "no receipts of this session: its rows were reordered")
        key = (request.session, request.start)
        self._outbox.tell(hop.state.client, self._signed(key, hop, request.id))

    async def _pass_on(self, client: PeerId, request: WantTokens, answer: WorkerReply) -> None:
        try:
            reply = await answer.wait()
        except (Refused, WorkerLost) as error:
            code = error.code if isinstance(error, Refused) else Code.SESSION_LOST
            refusal = Refusal(re=request.id, code=code.value, message=str(error)[:500])
            self._outbox.tell(client, encode_frame(refusal))
            return
        assert isinstance(reply, TokensAre)
        tokens = TokensAre(re=request.id, tensor=reply.tensor)
        self._outbox.tell(client, encode_frame(tokens, answer.payload))

    def _signed(self, key: Key, hop: SessionHop, call_id: int = 0) -> bytes:
        assert hop.trail is not None
        first, entered_digests, left_digests, previous = hop.trail.cut()
        body, signature = receipt.sign(
            Receipt(
                peer=self._served.identity.peer_id,
                client=hop.state.client,
                session=key[0],
                model=self._served.model,
                start=hop.span.start,
                end=hop.span.end,
                seq=hop.trail.seq,
                n_computed=hop.trail.taken.n_computed,
                at=int(self._exchange.now()),
                numerics=self._worker.loaded.numerics if self._worker.loaded else "",
                is_heir=hop.trail.is_heir,
                adapter=hop.trail.adapter,
                tuned=hop.trail.tuned,
                first=first,
                entered=entered_digests,
                left=left_digests,
                before=previous,
            ),
            self._served.identity,
        )
        so_far = UsageReceipt(
            giver=self._served.identity.peer_id,
            taker=hop.state.client,
            session=key[0],
            model=self._served.model,
            start=hop.span.start,
            end=hop.span.end,
            n_tokens=hop.trail.taken.n_owed,
            at=int(self._exchange.now()),
        )
        offered, giver_signature = usage_receipt.sign_offer(so_far, self._served.identity)
        message = ReceiptIs(
            re=call_id,
            session=key[0],
            start=key[1],
            signature=signature,
            bill=offered,
            given=giver_signature,
        )
        return encode_frame(message, body)
