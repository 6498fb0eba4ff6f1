#!/usr/bin/env bash
# py-libp2p 0.8.1: refreshing the routing table of its Kademlia DHT costs some 45 kB a node where eight nodes know each other.
#
# Guess: a refresh asks each of seven others twice for its nearest peers (for one's own id, and for a random one of the only
# bucket that is not empty); a question and an answer are some hundred bytes with eight ids and addresses: 3 to 5 kB a node.
# Seen (2026-11-30): each node sends 45 kB a refresh, and gets as much, without TCP's and IP's headers: each question opens a
# stream of its own, which agrees on its protocols anew, and bears its sender's signed record; each answer has those of all
# peers that it names. KadDHT does this by itself each ten minutes, so that eight nodes that nobody asks for anything move
# 12 MiB a day each, both ways.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check libp2p==0.8.1 trio==0.35.0
"$folder/venv/bin/python" - 2> "$folder/errors" <<'PYTHON' || { tail -5 "$folder/errors"; exit 1; }
import secrets
from contextlib import AsyncExitStack

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.kad_dht.kad_dht import ROUTING_TABLE_REFRESH_INTERVAL, DHTMode, KadDHT
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.peerinfo import PeerInfo
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

N = 8
n_sent = 0
write = RawConnection.write


async def count_and_write(self, data):
    global n_sent
    n_sent += len(data)
    await write(self, data)


RawConnection.write = count_and_write


async def main():
    async with AsyncExitStack() as stack:
        hosts, dhts = [], []
        for _ in range(N):
            host = new_host(key_pair=create_new_key_pair(secrets.token_bytes(32)))
            await stack.enter_async_context(host.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]))
            for other in hosts:
                await host.connect(PeerInfo(other.get_id(), other.get_addrs()))
            hosts.append(host)
        for host in hosts:
            dht = KadDHT(host, DHTMode.SERVER)
            await stack.enter_async_context(background_trio_service(dht))
            dhts.append(dht)
        for dht in dhts:
            for other in hosts:
                if other is not dht.host:
                    await dht.add_peer(other.get_id())
        await trio.sleep(10)  # what each does at its start is over
        before = n_sent
        await trio.sleep(5)
        assert n_sent == before, "nothing else is sent meanwhile"
        for dht in dhts:
            await dht.refresh_routing_table()
        a_node = (n_sent - before) / N
        buckets = {sum(bucket.size() > 0 for bucket in dht.routing_table.buckets) for dht in dhts}
        print(f"{a_node / 1000:.1f} kB sent by each of {N} nodes a refresh; buckets that are not empty: {buckets}")
        print(f"by itself each {ROUTING_TABLE_REFRESH_INTERVAL} s")
        assert ROUTING_TABLE_REFRESH_INTERVAL == 600 and buckets == {1}
        assert 30_000 < a_node < 70_000, a_node


trio.run(main)
PYTHON
echo "as described"
