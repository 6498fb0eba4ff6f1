"""Small scenarios that tests change."""

from __future__ import annotations

from swarmd.whatif.scenario import (
    Distance,
    Habit,
    LinkKind,
    Load,
    MachineKind,
    Scenario,
    ServedModel,
    Whereabouts,
)

MODEL = ServedModel("toy", blocks=8, block_parameters=1e8, hidden=1024, cache_numbers=1024)
LINE = LinkKind("line", up_mbit=100, down_mbit=100, access_ms=5)
CARD = MachineKind("card", count=1, memory_gb=8, link="line", block_ms=2, row_ms=0.1)
TALK = Load("toy", sessions_per_hour=20, prompt_tokens=64, new_tokens=100, spread=0)


def scenario(
    machines: tuple[MachineKind, ...] = (CARD,),
    load: tuple[Load, ...] = (),
    habits: tuple[Habit, ...] = (),
    models: tuple[ServedModel, ...] = (MODEL,),
    hours: float = 2,
    runs: int = 1,
) -> Scenario:
    """Two places, 40 ms apart, and what the test says."""
    return Scenario(
        models=models,
        machines=machines,
        links=(LINE,),
        places=(Whereabouts("here"), Whereabouts("there")),
        distances=(Distance(("here", "there"), 40),),
        habits=habits,
        load=load,
        hours=hours,
        warm_up_hours=1,
        runs=runs,
    )
