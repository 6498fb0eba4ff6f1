"""Imports go down only. Each forbidden import comes with its reason, so that a failure explains itself."""

from __future__ import annotations

import ast
import functools
import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (ROOT / "swarmd", ROOT / "cli" / "swarmd_cli")

LAYERS = {
    "swarmd.values": 0,
    "swarmd.clocks": 0,
    "swarmd.errors": 0,
    "swarmd.cgroups": 0,
    "swarmd.config": 0,
    "swarmd.folders": 0,
    "swarmd.hours": 0,
    "swarmd.importing": 0,
    "swarmd.logs": 0,
    "swarmd.text_files": 0,
    "swarmd.names": 0,
    "swarmd.printable": 0,
    "swarmd.resources": 0,
    "swarmd.status": 0,
    "swarmd.run_status": 0,
    "swarmd.member_status": 0,
    "swarmd.protocol": 1,
    "swarmd.plan": 1,
    "swarmd.whatif": 2,
    "swarmd.home": 2,
    "swarmd.usage_ledger": 2,
    "swarmd.compute": 2,
    "swarmd.wire": 2,
    "swarmd.net": 2,
    "swarmd.weights": 2,
    "swarmd.train": 3,
    "swarmd.node": 3,
    "swarmd.client": 3,
    "swarmd.daemon": 4,
    "swarmd.gateway": 4,
    "swarmd.report": 4,
    "swarmd.training_runs": 4,
    "swarmd": 4,
    "swarmd_cli": 5,
}

FORBIDDEN = [
    ("swarmd.protocol", "trio", "the protocol is sans-I/O: bytes in, values out"),
    ("swarmd.protocol", "torch", "the daemon parses messages without torch"),
    ("swarmd.protocol", "libp2p", "the protocol does not know what carries it"),
    ("swarmd.plan", "trio", "decisions are pure: time is an argument"),
    ("swarmd.plan", "torch", "decisions are made in the daemon, which has no torch"),
    ("swarmd.plan", "libp2p", "decisions do not know the network"),
    ("swarmd.plan", "time", "decisions read no clock"),
    ("swarmd.plan", "swarmd.clocks", "decisions read no clock"),
    ("swarmd.plan", "random", "decisions draw no random numbers of their own"),
    ("swarmd.whatif", "trio", "a model of time has no event loop"),
    ("swarmd.whatif", "torch", "what is computed here are times, not tokens"),
    ("swarmd.whatif", "time", "its time is virtual"),
    ("swarmd.compute", "trio", "the worker has no event loop"),
    ("swarmd.compute", "libp2p", "the worker knows no network: members of its team are told to it"),
    ("swarmd.wire", "swarmd.compute", "both sides use it: what computes is above it"),
    ("swarmd.wire", "trio", "bytes in, tensors out"),
    ("swarmd.compute", "swarmd.net", "the worker knows no network: members of its team are told to it"),
    ("swarmd.net", "torch", "the daemon stays small"),
    ("swarmd.net", "swarmd.compute", "network without torch"),
    ("swarmd.weights", "torch", "the daemon stays small; bytes are bytes"),
    ("swarmd.node", "torch", "the daemon stays small"),
    ("swarmd.node", "transformers", "the daemon stays small"),
    ("swarmd.node", "swarmd.compute", "a daemon reaches the worker through its socket only"),
    ("swarmd.node", "swarmd.client", "services never import each other's side"),
    ("swarmd.node", "swarmd.train", "training uses the node's worker link, never the other way round"),
    ("swarmd.train", "transformers", "the daemon stays small"),
    ("swarmd.client", "swarmd.node", "services never import each other's side"),
    ("swarmd.gateway", "swarmd.node", "it is a client, in a process of its own"),
    ("swarmd.gateway", "swarmd.train", "it is a client, in a process of its own"),
    ("swarmd.daemon", "swarmd.gateway", "the daemon has no torch: the gateway is another process"),
    ("swarmd", "pickle", "no pickle, ever"),
]
LIBP2P_HOME = "swarmd.net.libp2p"


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def modules(at_run_time: bool = False) -> dict[str, set[str]]:
    """Every module of the project with what it imports, imports for type-checking included unless told otherwise."""
    imports = {}
    for package in PACKAGES:
        for path in package.rglob("*.py"):
            parts = path.relative_to(package.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            imported: set[str] = set()
            body = [node for node in parsed(path).body if not (at_run_time and is_for_types(node))]
            for node in itertools.chain.from_iterable(map(ast.walk, body)):
                if isinstance(node, ast.Import):
                    imported |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    imported |= {node.module} | {f"{node.module}.{a.name}" for a in node.names}
            imports[name] = imported
    return imports


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def layer(module: str) -> int | None:
    matches = [p for p in LAYERS if is_in(module, p)]
    return LAYERS[max(matches, key=len)] if matches else None


def test_imports_go_down_only() -> None:
    wrong = []
    for module, imported in modules().items():
        mine = layer(module)
        for target in imported:
            theirs = layer(target)
            if theirs is not None and mine is not None and theirs > mine:
                wrong.append(f"{module} (layer {mine}) imports {target} (layer {theirs})")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("package", "target", "why"), FORBIDDEN)
def test_forbidden_import(package: str, target: str, why: str) -> None:
    offenders = [
        m for m, imported in modules().items() if is_in(m, package) and any(is_in(i, target) for i in imported)
    ]
    assert not offenders, f"{offenders} import {target}: {why}"


def opens_text_by_locale(call: ast.Call) -> bool:
    """Does a call read or write text in whichever encoding the machine's locale has?"""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if "encoding" in {keyword.arg for keyword in call.keywords}:
        return False
    if name in ("read_text", "write_text"):
        return isinstance(call.func, ast.Attribute)  # pathlib's
    modes = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    return name in ("open", "fdopen", "NamedTemporaryFile", "TemporaryFile") and any(
        m in modes for m in ("r", "w", "a")
    )


def test_text_files_are_utf8_in_every_locale() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for package in PACKAGES
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and opens_text_by_locale(node)
    ]
    assert not wrong, f'{wrong}: say encoding="utf-8"'


def test_http_is_asked_from_three_places_only() -> None:
    """A client that is made elsewhere would send prompts and tokens through the proxy of the environment."""
    clients = {"httpx", "http.client", "urllib.request", "urllib3", "requests", "aiohttp"}
    known = {
        "swarmd.net.local",  # the daemon's Unix socket
        "swarmd_cli.gateway_client",  # the gateway on loopback: never by a proxy
        "swarmd.weights.hub",  # the hub, which proxies are for
    }
    assert {name for name, imported in modules().items() if imported & clients} == known


def test_only_one_folder_knows_libp2p() -> None:
    offenders = [
        m
        for m, imported in modules().items()
        if not is_in(m, LIBP2P_HOME) and any(is_in(i, "libp2p") for i in imported)
    ]
    assert not offenders, f"{offenders} import libp2p: only {LIBP2P_HOME} knows it"


def test_daemon_never_imports_torch() -> None:
    code = (
        "import sys, swarmd.daemon, swarmd.net.libp2p.kademlia, swarmd_cli.verbs.member; "
        "bad = {'torch', 'transformers'} & set(sys.modules); assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


MOST_LINES = 600  # STYLE.md: a module is as long as its idea, up to this
MOST_FUNCTION_LINES = 80
# Longer for a reason, and never longer than this: the numbers may only shrink, and an entry that is not needed goes.
LONG_FILES: dict[str, tuple[int, str]] = {}
LONG_FUNCTIONS: dict[str, tuple[int, str]] = {}


def unexplained(path: Path) -> list[str]:
    """Numbers of a module that have a name and no reason: neither a comment on their line nor a docstring below."""
    source = path.read_text()
    lines = source.splitlines()
    body = parsed(path).body
    names = []
    for node, below in itertools.zip_longest(body, body[1:]):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if not (isinstance(target, ast.Name) and target.id.isupper() and isinstance(node, ast.Assign | ast.AnnAssign)):
            continue
        parts = list(ast.walk(node.value)) if node.value else []
        is_number = any(isinstance(part, ast.Constant) and type(part.value) in (int, float) for part in parts)
        is_plain = all(
            isinstance(p, ast.Constant | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop) for p in parts
        )
        is_said = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if is_number and is_plain and not is_said and "#" not in lines[node.lineno - 1]:
            names.append(f"{path.relative_to(ROOT)}:{node.lineno} {target.id}")
    return names


def test_numbers_with_names_say_why_they_are_what_they_are() -> None:
    assert not [name for package in PACKAGES for path in sorted(package.rglob("*.py")) for name in unexplained(path)]


PICTURE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- made by python -m tests.test_architecture -->"
END = "<!-- end -->"


@functools.cache
def lengths() -> tuple[dict[str, int], dict[str, int]]:
    """Lines of every file, and of every function of it."""
    files = {}
    functions = {}
    for package in PACKAGES:
        for path in package.rglob("*.py"):
            name = str(path.relative_to(ROOT))
            text = path.read_text()
            files[name] = len(text.splitlines())
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    functions[f"{name}:{node.name}"] = (node.end_lineno or 0) - node.lineno + 1
    return files, functions


@pytest.mark.parametrize("what", ["files", "functions"])
def test_files_and_functions_stay_small(what: str) -> None:
    measured = lengths()[what == "functions"]
    limit, exceptions = (MOST_LINES, LONG_FILES) if what == "files" else (MOST_FUNCTION_LINES, LONG_FUNCTIONS)
    too_long = {n: length for n, length in measured.items() if length > exceptions.get(n, (limit, ""))[0]}
    assert not too_long, f"cut them where they want to be cut: {too_long}"
    needless = [n for n in exceptions if measured.get(n, 0) <= limit]
    assert not needless, f"these need no exception any more: {needless}"


def rooms() -> dict[str, set[str]]:
    """Every package with the packages that it imports; what is beside them counts by its own name."""
    known = sorted(LAYERS, key=len, reverse=True)

    def room(module: str) -> str | None:
        return next((package for package in known if is_in(module, package)), None)

    imports: dict[str, set[str]] = {package: set() for package in LAYERS}
    for module, imported in modules(at_run_time=True).items():
        importer = room(module)
        targets = {room(target) for target in imported} - {None, importer}
        if importer is not None:
            imports[importer] |= {target for target in targets if target is not None}
    return imports


def test_no_two_packages_import_each_other_round_in_a_circle() -> None:
    assert not left_in_circles({package: targets - {"swarmd"} for package, targets in rooms().items()})


# Wings of a room, and which of each other's modules theirs may import. Modules beside wings are the room's top: they
# may import all wings, and no wing imports them, but for those that are named as a wing's ground here.
WINGS: dict[str, dict[str, set[str]]] = {
    "compute": {
        "hardware": set(),
        "compiled": {"hardware"},
        "cuda": {"compiled"},
        "linear": {"compiled", "cuda", "hardware"},
        "llama_cpp": {"hardware"},
        "model": {"cuda", "hardware", "linear", "llama_cpp"},
        "cache": {"compiled", "model"},
        "passes": {"cache", "compiled", "cuda", "hardware", "linear", "model"},
        "checkpoints": {"cache", "llama_cpp", "model", "passes"},
        "serving": {"cache", "hardware", "llama_cpp", "model", "passes", "teams"},
        "teams": {"cache", "hardware", "model", "passes"},
        "runs": {"hardware", "model", "passes"},
    },
    "train": {
        "vectors": set(),
        "store": {"vectors"},
        "gradients": {"store", "vectors"},
        "rounds": {"store", "vectors"},
        "stages": {"gradients", "store", "vectors"},
    },
    "client": {
        "links": set(),
        "text": set(),
        "drafting": set(),
        "sessions": {"links"},
        "tuning": {"links"},
        "model": {"drafting", "links", "tuning"},
    },
    "node": {
        "worker": set(),
        "machine": {"worker"},
        "members": set(),
        "teams": {"machine", "worker"},
        "serving": {"machine", "members", "teams", "worker"},
    },
    "plan": {
        "links": set(),
        "chains": {"links"},
        "layouts": {"chains", "links"},
        "members": {"chains", "links"},
        "owner": {"links"},
        "runs": set(),
        "teams": set(),
        "trust": set(),
    },
    "gateway": {"generation": set(), "apis": {"generation"}, "batches": {"apis"}},
    "protocol": {
        "membership": set(),
        "models": set(),
        "runs": {"membership", "models"},
        "wire": {"runs"},
        "accounts": {"membership", "wire"},
    },
}
GROUND = {"swarmd.protocol.fields", "swarmd.protocol.untrusted"}  # what all wings of a room stand on
MOST_MODULES = 20  # in one folder: a reader finds the one to change within a minute


def wing(room: str, module: str) -> str:
    """The wing of a room's module; empty for what is beside the wings."""
    rest = module.removeprefix(f"swarmd.{room}.").split(".")
    return rest[0] if rest[0] in WINGS[room] else ""


def arrows(room: str) -> dict[tuple[str, str], set[str]]:
    """Which wing of a room imports which other, and by which modules; imports that are for types only included."""
    known = modules()
    by_ends: dict[tuple[str, str], set[str]] = {}
    for module, imported in known.items():
        for target in imported & known.keys():
            if is_in(module, f"swarmd.{room}") and is_in(target, f"swarmd.{room}") and f"swarmd.{room}" != target:
                ends = (wing(room, module), wing(room, target))
                if ends[0] != ends[1] and target not in GROUND:
                    by_ends.setdefault(ends, set()).add(f"{module} imports {target}")
    return by_ends


@pytest.mark.parametrize("room", WINGS)
def test_wings_import_each_other_as_the_table_says(room: str) -> None:
    crossing = {
        ends: imports for ends, imports in arrows(room).items() if ends[0] and not is_in(f"swarmd.{room}", ends[1])
    }
    allowed = {(importer, target) for importer, targets in WINGS[room].items() for target in targets}
    wrong = [f"{ends}: {imports}" for ends, imports in crossing.items() if ends not in allowed]
    assert not wrong, "\n".join(wrong)
    assert not allowed - crossing.keys(), f"nothing needs these any more: {allowed - crossing.keys()}"


@pytest.mark.parametrize("room", WINGS)
def test_wings_do_not_import_each_other_in_a_circle(room: str) -> None:
    assert not left_in_circles(WINGS[room])


def left_in_circles(imports: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """What is left once all that imports nothing of the rest has been taken away, again and again."""
    remaining = {name: set(targets) & imports.keys() for name, targets in imports.items()}
    while leaves := [name for name, targets in remaining.items() if not targets & remaining.keys()]:
        for leaf in leaves:
            del remaining[leaf]
    return remaining


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = modules()
    packages = {str(Path(m)) for m in known if any(is_in(target, m) and target != m for target in known)}
    imports = {m: imported & known.keys() - packages - {m} for m, imported in known.items() if m not in packages}
    assert not left_in_circles(imports)


def test_no_folder_holds_more_modules_than_a_reader_looks_through() -> None:
    counts = Counter(path.parent for package in PACKAGES for path in package.rglob("*.py") if path.stem != "__init__")
    assert not {str(folder.relative_to(ROOT)): n for folder, n in counts.items() if n > MOST_MODULES}


def wings_table() -> str:
    """All wings with what they are for (their own first line), and which others they import."""
    lines = ["| room | wing | what it holds | imports |", "|---|---|---|---|"]
    for room, wings in WINGS.items():
        for name, targets in wings.items():
            text = ast.get_docstring(ast.parse((ROOT / "swarmd" / room / name / "__init__.py").read_text())) or ""
            lines.append(f"| {room} | `{name}` | {text} | {', '.join(f'`{target}`' for target in sorted(targets))} |")
    return "\n".join(lines)


def picture() -> str:
    """The packages by layers, each with what it imports, as docs/architecture.md shows them."""
    imports = rooms()
    lines = ["```mermaid", "flowchart TD"]
    for number in sorted(set(LAYERS.values()), reverse=True):
        lines.append(f"  subgraph layer{number}[layer {number}]")
        packages = sorted(p for p, n in LAYERS.items() if n == number)
        lines += [f"    {p.replace('.', '_')}[{p.removeprefix('swarmd.')}]" for p in packages]
        lines.append("  end")
    for package in sorted(imports):
        for target in sorted(imports[package] - {"swarmd"}):
            if LAYERS[target] > 0:  # values, errors, config and status are everybody's
                lines.append(f"  {package.replace('.', '_')} --> {target.replace('.', '_')}")
    return "\n".join([*lines, "```", "", wings_table()])


def test_the_picture_is_that_of_the_imports() -> None:
    text = PICTURE.read_text()
    shown = text.split(BEGIN)[1].split(END)[0].strip()
    assert shown == picture(), "python -m tests.test_architecture draws it anew"


if __name__ == "__main__":
    before, _, rest = PICTURE.read_text().partition(BEGIN)
    PICTURE.write_text(f"{before}{BEGIN}\n{picture()}\n{END}{rest.partition(END)[2]}")
