"""docs/glossary.md says what every public class is, in the class's own words, and a name means one thing."""

from __future__ import annotations

from tools import glossary


def test_the_glossary_is_that_of_the_source() -> None:
    assert glossary.PAGE.read_text() == glossary.page(), "python -m tools.glossary writes it anew"


def test_a_class_name_means_one_thing_in_the_whole_tree() -> None:
    assert not glossary.doubled_names()


def test_every_public_class_says_what_it_is() -> None:
    assert not [f"{entry.module}: {entry.name}" for entry in glossary.entries() if not entry.meaning]
