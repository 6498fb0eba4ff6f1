"""Clusters that others have published, with what their planners reached: figures only.

Helix (Mei et al., ASPLOS 2025; artifact, Apache 2): LLaMA 70B on cards of Google's cloud. Tokens/s of a machine by how
many of the 80 layers it holds, added up as its planner does from measured layer times; where its own layout puts each
machine; the flow that its planner says. DT-FM (Yuan et al., NeurIPS 2022; MIT): round trips and bandwidths between
regions of a cloud, and bytes of an update of GPT-3 1.3B on 64 machines.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swarmd.plan.layouts.flow import LayoutMachine
from swarmd.plan.layouts.pipelines import PipelineLinks
from swarmd.values import Span

Floats = NDArray[np.float64]
Table = dict[str, tuple[float, ...]]
N_LAYERS = 80  # of LLaMA 70B
TOKEN_BYTES = 16_384  # of a hidden state, in half precision

OF_24: Table = {
    "A100": (23833.9, 11384.3, 7201.4, 5264.6, 4096.7, 3124.1, 2595.7, 2045.6, 1754.4, 1392.6, 1212.2, 952.1),
    "L4": (7557.9, 3625.7, 2171.9, 1476.1, 1017.6, 747.8, 531.7),
    "T4": (5709.2, 2434.4, 1347.9, 757.9),
}
OF_42: Table = {
    "A100": (31327.5, 15363.3, 9918.1, 7039.2, 5430.0, 4251.3, 3405.8, 2847.0, 2339.9, 1931.1, 1652.9, 1363.7),
    "V100": (14014.1, 5890.2, 3342.5, 1982.2),
    "L4": (9111.5, 4239.1, 2563.3, 1812.3, 1285.2, 916.8, 655.7),
    "L4x2": (
        17269.0,
        8426.9,
        5441.1,
        3929.4,
        3061.0,
        2461.6,
        2030.4,
        1712.9,
        1450.2,
        1290.5,
        1107.2,
        964.3,
        838.5,
        727.7,
    ),
    "T4": (6179.9, 2911.5, 1622.4, 927.6),
    "T4x2": (12194.2, 5813.7, 3663.7, 2706.1, 2121.4, 1627.0, 1271.8, 1021.9, 783.5),
    "T4x4": (
        20503.5,
        10085.5,
        6640.7,
        4892.2,
        3841.2,
        3136.8,
        2651.2,
        2268.5,
        1981.1,
        1738.6,
        1548.7,
        1389.0,
        1281.5,
        1180.0,
        1071.2,
        973.6,
        872.9,
        781.3,
    ),
}

SINGLE = "L4 T4 T4 L4 T4 L4 A100 T4 T4 A100 A100 L4 T4 T4 L4 T4 T4 A100 L4 T4 T4 L4 T4 L4"
SINGLE_LAYOUT = (
    (7, 11),
    (34, 38),
    (23, 26),
    (53, 60),
    (77, 80),
    (53, 60),
    (68, 77),
    (26, 30),
    (30, 34),
    (37, 49),
    (60, 68),
    (42, 49),
    (33, 37),
    (38, 42),
    (3, 7),
    (0, 3),
    (11, 14),
    (14, 23),
    (46, 53),
    (42, 46),
    (7, 8),
    (53, 60),
    (49, 53),
    (26, 33),
)
GEO = "A100 " * 4 + "L4 " * 2 + "T4 " * 8 + "L4 " * 6 + "T4 " * 4
GEO_LAYOUT = (
    (59, 70),
    (70, 80),
    (48, 59),
    (37, 48),
    (19, 26),
    (26, 32),
    (15, 19),
    (26, 30),
    (32, 33),
    (5, 6),
    (18, 22),
    (7, 8),
    (76, 79),
    (33, 37),
    (1, 7),
    (7, 11),
    (1, 8),
    (30, 37),
    (8, 15),
    (0, 1),
    (22, 26),
    (11, 14),
    (14, 18),
    (75, 76),
)
MANY_KINDS = (
    "T4 L4x2 L4 V100 T4x4 L4x2 L4 V100 A100 T4x2 T4 T4x2 V100 T4 V100 L4 T4 T4x2 L4 T4 L4x2 "
    "A100 T4x2 L4 T4x2 T4 V100 T4x4 L4 T4 T4 T4x4 L4x2 T4x4 T4x2 A100 T4 L4 V100 L4 A100 T4"
)
MANY_KINDS_LAYOUT = (
    (27, 31),
    (19, 29),
    (45, 48),
    (56, 59),
    (29, 41),
    (9, 19),
    (66, 69),
    (13, 16),
    (19, 27),
    (60, 63),
    (9, 13),
    (48, 56),
    (27, 31),
    (41, 45),
    (16, 19),
    (59, 60),
    (63, 66),
    (48, 56),
    (39, 45),
    (12, 13),
    (69, 77),
    (2, 8),
    (69, 77),
    (1, 8),
    (59, 66),
    (9, 13),
    (9, 13),
    (39, 56),
    (2, 3),
    (41, 45),
    (79, 80),
    (63, 77),
    (39, 45),
    (63, 80),
    (69, 77),
    (49, 60),
    (77, 79),
    (0, 2),
    (45, 49),
    (8, 9),
    (31, 39),
    (77, 80),
)


@dataclass(frozen=True, slots=True)
class PublishedCluster:
    """Machines, the layout and the flow that its authors found, and links where they are the limit."""

    name: str
    machines: list[LayoutMachine]
    groups: list[str]  # what is alike, or at one place: laid out side by side
    layout: list[Span]
    flow: float
    links: Floats | None = None


def helix_clusters() -> list[PublishedCluster]:
    """The three clusters: one place, three regions with 80 to 120 Mbit/s between them, 42 machines of seven kinds."""
    links = np.full((24, 24), 1.25e9 / TOKEN_BYTES)
    site = [0] * 4 + [1] * 10 + [2] * 10
    rng = random.Random(0)
    for i in range(24):
        for j in range(i):
            if site[i] != site[j]:
                links[i, j] = links[j, i] = rng.uniform(10e6, 15e6) / TOKEN_BYTES
    geo = _cluster("24 in three regions", GEO, OF_24, GEO_LAYOUT, 1212.2, links)
    geo = PublishedCluster(geo.name, geo.machines, [str(s) for s in site], geo.layout, geo.flow, links)
    return [
        _cluster("24 in one place", SINGLE, OF_24, SINGLE_LAYOUT, 1289.6),
        geo,
        _cluster("42 of seven kinds", MANY_KINDS, OF_42, MANY_KINDS_LAYOUT, 4137.5),
    ]


def _cluster(
    name: str, kinds: str, table: Table, layout: tuple[tuple[int, int], ...], flow: float, links: Floats | None = None
) -> PublishedCluster:
    machines = [LayoutMachine(table[kind]) for kind in kinds.split()]
    return PublishedCluster(name, machines, kinds.split(), [Span(*ends) for ends in layout], flow, links)


REGIONS = {
    ("Oregon", "Virginia"): (67, 0.79),
    ("Oregon", "Ohio"): (49, 1.10),
    ("Oregon", "Tokyo"): (96, 0.523),
    ("Oregon", "Seoul"): (124, 0.46),
    ("Oregon", "London"): (136, 0.42),
    ("Oregon", "Frankfurt"): (143, 0.404),
    ("Oregon", "Ireland"): (124, 0.482),
    ("Oregon", "California"): (12, 1.25),
    ("Virginia", "Ohio"): (11, 1.12),
    ("Virginia", "Tokyo"): (143, 0.524),
    ("Virginia", "Seoul"): (172, 0.5),
    ("Virginia", "London"): (76, 1.16),
    ("Virginia", "Frankfurt"): (90, 1.02),
    ("Virginia", "Ireland"): (67, 1.05),
    ("Virginia", "California"): (59, 1.05),
    ("Ohio", "California"): (52, 1.02),
    ("Ohio", "Tokyo"): (130, 0.694),
    ("Ohio", "Seoul"): (159, 0.529),
    ("Ohio", "London"): (86, 1.05),
    ("Ohio", "Frankfurt"): (99, 0.799),
    ("Ohio", "Ireland"): (77, 1.14),
    ("Tokyo", "Seoul"): (34, 1.10),
    ("Tokyo", "London"): (210, 0.366),
    ("Tokyo", "Frankfurt"): (223, 0.36),
    ("Tokyo", "Ireland"): (199, 0.465),
    ("Seoul", "London"): (238, 0.342),
    ("Seoul", "Frankfurt"): (235, 0.358),
    ("Seoul", "Ireland"): (228, 0.335),
    ("London", "Frankfurt"): (14, 1.14),
    ("London", "Ireland"): (12, 1.09),
    ("Frankfurt", "Ireland"): (24, 1.08),
}
"""Milliseconds of delay and Gbit/s between regions, as DT-FM measured them."""
WORLD = ("Oregon", "Virginia", "Ohio", "Tokyo", "Seoul", "London", "Frankfurt", "Ireland")
US = ("Virginia", "Oregon", "California", "Ohio")


def dtfm_cases() -> Iterator[tuple[str, PipelineLinks]]:
    """DT-FM's five cases: 64 machines each, eight stages of eight."""
    fast_in_eights = 3.125 + np.kron(np.eye(8), np.full((8, 8), 96.875))
    yield "data centre", _links(np.zeros((64, 64)), fast_in_eights, 288 / 1024, 1.0)
    fast_in_fours = 1.25 + np.kron(np.diag([1.0] * 8 + [0.0] * 8), np.full((4, 4), 98.75))
    yield "spot cards", _links(np.zeros((64, 64)), fast_in_fours, 288 / 1024, 1.0)
    yield "two universities", _links(*_regions(("Ohio", "Virginia"), (1, 5)), 288 / 1024, 1.0)
    yield "four regions", _links(*_regions(US, (5, 2)), 0.4, 0.7)
    yield "world", _links(*_regions(WORLD, (5, 2)), 0.5, 0.9)


def _links(delay_ms: Floats, gbit_per_s: Floats, activation_gb: float, gradient_gb: float) -> PipelineLinks:
    return PipelineLinks(delay_ms / 1e3, gbit_per_s * 1e9 / 8, activation_gb * 1e9, gradient_gb * 1e9)


def _regions(names: tuple[str, ...], within: tuple[float, float]) -> tuple[Floats, Floats]:
    """Milliseconds and Gbit/s between 64 machines, as many in each region."""
    where = [name for name in names for _ in range(64 // len(names))]
    delay = np.zeros((64, 64))
    rate = np.zeros((64, 64))
    for i, one in enumerate(where):
        for j, other in enumerate(where):
            found = within if one == other else REGIONS.get((one, other)) or REGIONS[other, one]
            delay[i, j], rate[i, j] = found
    return delay, rate
