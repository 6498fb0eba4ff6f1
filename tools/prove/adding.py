"""A model that the machine could not hold is added from a hub on loopback: how much memory and disk does that take?

    python -m tools.prove.adding [--gigabytes 200]

The hub's shards are files of a Llama's shapes with holes for numbers, so they take no disk either; it gives no hashes
of its own. Printed: bytes that the hub gave, the time, the command's largest memory, and what it left on the disk.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from swarmd.home.founder import Founder
from swarmd.home.models import bundled_folder
from swarmd.home.paths import Home
from swarmd.protocol.models import shards

COMMIT = "c" * 40
WIDTH, INNER, VOCABULARY = 8_192, 28_672, 32_000
PER_SHARD = 3  # layers: about 5 GB
Listed = list[tuple[str, str, tuple[int, ...]]]


def layer(number: int) -> Listed:
    """The tensors of a layer of a Llama 3 70B."""
    shapes = {
        "self_attn.q_proj": (WIDTH, WIDTH),
        "self_attn.k_proj": (WIDTH // 8, WIDTH),
        "self_attn.v_proj": (WIDTH // 8, WIDTH),
        "self_attn.o_proj": (WIDTH, WIDTH),
        "mlp.gate_proj": (INNER, WIDTH),
        "mlp.up_proj": (INNER, WIDTH),
        "mlp.down_proj": (WIDTH, INNER),
        "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,),
    }
    return [(f"model.layers.{number}.{name}.weight", "BF16", shape) for name, shape in shapes.items()]


def write_hollow(folder: Path, n_bytes: int) -> int:
    """Write a checkpoint of so many bytes with holes for numbers; returns how many it has."""
    layer_bytes = sum(shards.tensor_bytes(dtype, shape) for _, dtype, shape in layer(0))
    n_layers = round(n_bytes / layer_bytes)
    ends = [
        ("model.embed_tokens.weight", "BF16", (VOCABULARY, WIDTH)),
        ("model.norm.weight", "BF16", (WIDTH,)),
        ("lm_head.weight", "BF16", (VOCABULARY, WIDTH)),
    ]
    parts = [ends]
    for first in range(0, n_layers, PER_SHARD):
        numbers = range(first, min(first + PER_SHARD, n_layers))
        parts.append([tensor for number in numbers for tensor in layer(number)])
    weight_map: dict[str, str] = {}
    total = 0
    for index, tensors in enumerate(parts):
        name = f"model-{index:05d}.safetensors"
        header, places = shards.make_header(tensors)
        with (folder / name).open("wb") as file:
            file.write(header)
            file.truncate(places[-1].start + places[-1].n_bytes)
            total += file.tell() if not places else places[-1].start + places[-1].n_bytes
        weight_map |= {tensor[0]: name for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=n_layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
    )
    config.save_pretrained(folder)
    for path in bundled_folder().glob("tokenizer*"):
        shutil.copy(path, folder)
    return total


def handler(folder: Path, sent: Counter[str]) -> type[http.server.BaseHTTPRequestHandler]:
    """What answers for the files as the hub does."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(is_head=True)

        def do_GET(self) -> None:
            names = [path.name for path in folder.iterdir()]
            if self.path.startswith("/api/models/org/name/tree/"):
                self._say([{"type": "file", "path": name, "size": 1, "oid": name} for name in names])
            elif self.path.startswith("/api/models/"):
                self._say({"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]})
            else:
                self._answer(is_head=False)

        def _say(self, answer: Any) -> None:
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _answer(self, is_head: bool) -> None:
            path = folder / Path(self.path.partition("?")[0]).name
            if not path.is_file():
                self.send_error(404)
                return
            size = path.stat().st_size
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            start, stop = (int(wanted[1]), min(int(wanted[2]) + 1, size)) if wanted else (0, size)
            self.send_response(206 if wanted else 200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{path.name}"')
            self.send_header("Content-Length", str(stop - start))
            self.end_headers()
            if not is_head:
                with path.open("rb") as file:
                    while start < stop:
                        start += os.sendfile(self.connection.fileno(), file.fileno(), start, min(stop - start, 2**24))
                sent[path.suffix] += stop

        def log_message(self, *args: Any) -> None: ...

    return Handler


def on_disk(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=int, default=200)
    n_bytes = parser.parse_args().gigabytes * 10**9
    with tempfile.TemporaryDirectory() as root:
        hub, home, cache = (Path(root) / name for name in ("hub", "home", "cache"))
        for folder in (hub, home, cache):
            folder.mkdir()
        total = write_hollow(hub, n_bytes)
        Founder(Home(home)).found("ours")
        sent: Counter[str] = Counter()
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler(hub, sent)) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            settings = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(cache)}
            command = [sys.executable, "-m", "swarmd_cli.main", "--home", str(home), "models", "add", "org/name"]
            begun = time.monotonic()
            subprocess.run([*command, "--name", "big", "--no-copy"], env={**os.environ, **settings}, check=True)
            took_s = time.monotonic() - begun
            server.shutdown()
        largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        print(f"{total / 1e9:.1f} GB of tensors; the hub gave {sent['.safetensors'] / 1e9:.1f} GB in {took_s:.0f} s")
        print(f"memory: {largest / 1e6:.0f} MB; disk: {(on_disk(home) + on_disk(cache)) / 1e6:.1f} MB")
        assert largest < 1e9
        assert on_disk(home) + on_disk(cache) < 1e9


if __name__ == "__main__":
    main()
