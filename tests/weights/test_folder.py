"""Groups of a model on disk: what is verified stays, what is not is never believed, and the disk may say no."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from safetensors import safe_open

from swarmd.errors import ConfigError, IntegrityError, Refused
from swarmd.weights import folder as files
from swarmd.weights.folder import GroupDownload, ModelFolder
from swarmd.weights.library import Library
from tests.weights.conftest import N_BLOCKS, make_model

HEAD = N_BLOCKS


def copy(source: ModelFolder, target: ModelFolder, group: int, at_most: int | None = None) -> GroupDownload:
    part = GroupDownload(target, group)
    part.begin()
    for ref in list(part.missing)[:at_most]:
        part.put(ref, source.read(ref))
    if not part.missing:
        part.finish()
    return part


def test_a_checkpoint_holds_all_groups_and_each_tensor_has_its_own(whole: ModelFolder) -> None:
    assert whole.held == set(range(N_BLOCKS + 1))
    by_name = dict(zip((e.name for e in whole.manifest.entries), whole.groups, strict=True))
    assert by_name["layers.2.w"] == by_name["layers.2.b"] == 2
    assert by_name["tokenizer.json"] == by_name["embed.weight"] == by_name["extra.9.weight"] == HEAD
    assert by_name[f"layers.{N_BLOCKS}.w"] is None, "a layer beyond the configured ones is nobody's"


def test_copied_groups_are_safetensors_with_the_same_bytes(whole: ModelFolder, tmp_path: Path) -> None:
    target = files.create(tmp_path / "store", whole.manifest)
    assert target.held == set()
    copy(whole, target, 1)
    copy(whole, target, HEAD)
    assert ModelFolder(target.folder, whole.manifest).held == {1, HEAD} == target.held
    with (
        safe_open(target.folder / "block-0001.safetensors", "np") as ours,
        safe_open(whole.folder / "model.safetensors", "np") as theirs,
    ):
        assert set(ours.keys()) == {"layers.1.w", "layers.1.b"}
        assert ours.get_tensor("layers.1.w").tobytes() == theirs.get_tensor("layers.1.w").tobytes()
    assert (target.folder / "tokenizer.json").read_text() == '{"a": 1}'
    with pytest.raises(Refused, match="is not here"):
        target.read((1 + next(i for i, g in enumerate(whole.groups[1:]) if g == 0), 0))


def test_what_was_verified_before_a_crash_is_not_asked_for_again(whole: ModelFolder, tmp_path: Path) -> None:
    target = files.create(tmp_path / "store", whole.manifest)
    first = copy(whole, target, 2, at_most=2)
    left = set(first.missing)
    assert left, "the part is not complete"
    again = GroupDownload(target, 2)
    again.begin()
    assert set(again.missing) == left
    path = next(slot.part for slot in target.slots(2))
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"spoiled")
    spoiled = GroupDownload(target, 2)
    spoiled.begin()
    assert len(spoiled.missing) > len(left), "what a crash left half written is not believed"


def test_other_bytes_are_refused_and_nothing_is_written(whole: ModelFolder, tmp_path: Path) -> None:
    target = files.create(tmp_path / "store", whole.manifest)
    part = GroupDownload(target, 0)
    part.begin()
    ref = next(iter(part.missing))
    before = set(part.missing)
    with pytest.raises(IntegrityError, match="another sha256 than the manifest says"):
        part.put(ref, bytes(part.missing[ref]))
    assert set(part.missing) == before


def test_two_processes_that_fetch_the_same_group_do_each_other_no_harm(whole: ModelFolder, tmp_path: Path) -> None:
    target = files.create(tmp_path / "store", whole.manifest)
    ours, theirs = GroupDownload(target, HEAD), GroupDownload(target, HEAD)
    ours.begin()
    theirs.begin()
    refs = list(ours.missing)
    for ref in refs[:-1]:
        ours.put(ref, whole.read(ref))
    for ref in refs:
        theirs.put(ref, whole.read(ref))
    theirs.finish()
    ours.put(refs[-1], whole.read(refs[-1]))
    ours.finish()
    assert target.held == {HEAD}
    assert not target.damaged()


def test_a_full_disk_says_so_and_keeps_what_is_there(
    whole: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = files.create(tmp_path / "store", whole.manifest)
    part = copy(whole, target, 0, at_most=1)
    ref = next(iter(part.missing))
    data = whole.read(ref)

    def full(path: Path, flags: int = 0) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(files, "_open", full)
        with pytest.raises(ConfigError, match="No space left on device; what was verified is kept: make room"):
            part.put(ref, data)
    assert set(copy(whole, target, 0, at_most=0).missing) == set(part.missing)


def test_a_symbolic_link_in_the_way_is_not_followed(whole: ModelFolder, tmp_path: Path) -> None:
    target = files.create(tmp_path / "store", whole.manifest)
    victim = tmp_path / "precious"
    victim.write_text("precious")
    next(slot.part for slot in target.slots(0)).symlink_to(victim)
    with pytest.raises(ConfigError, match="a symbolic link is in the way"):
        GroupDownload(target, 0).begin()
    assert victim.read_text() == "precious"


def test_what_changed_on_disk_is_not_given_away(whole: ModelFolder) -> None:
    shard = whole.folder / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-100_000] ^= 1
    shard.write_bytes(data)
    assert len(whole.damaged()) == 1
    (name,) = whole.damaged()
    index = next(i for i, e in enumerate(whole.manifest.entries) if e.name == name)
    last = len(whole.manifest.entries[index].chunks) - 1
    with pytest.raises(Refused, match="no longer what it was"):
        whole.read((index, last))


@pytest.mark.parametrize("ref", [(10_000, 0), (0, 10_000)])
def test_chunks_that_do_not_exist_are_refused(whole: ModelFolder, ref: tuple[int, int]) -> None:
    with pytest.raises(Refused, match=r"which .* does not have"):
        whole.read(ref)


def test_the_least_recently_used_goes_first_and_never_what_is_in_use(whole: ModelFolder, tmp_path: Path) -> None:
    root = tmp_path / "store"
    target = files.create(root, whole.manifest)
    for group in range(N_BLOCKS):
        copy(whole, target, group)
        os.utime(target.slots(group)[0].path, (group, group))
    library = Library(root, {}, limit_bytes=1)
    library.limit_bytes = library.used_bytes() + 1_000_000  # 1 MB is free
    model = target.model
    gone = library.make_room(6_000_000, {model: frozenset({0})})
    assert gone == [f"group 1 of {model[:12]}"]
    assert library.folders[model].held == {0, 2, 3}
    with pytest.raises(ConfigError, match=r"exceed the disk limit .* make room"):
        library.make_room(10**9, {model: frozenset({0, 2, 3})})


def test_folders_of_the_user_are_never_deleted(whole: ModelFolder, tmp_path: Path) -> None:
    library = Library(tmp_path / "store", {whole.model: whole.folder})
    with pytest.raises(ConfigError, match="a folder of yours"):
        library.remove(whole.model)
    assert library.folders[whole.model].held == whole.held


def test_a_folder_that_is_no_longer_what_was_added_is_left_out(whole: ModelFolder, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", seed=9)
    library = Library(tmp_path / "store", {whole.model: other})
    assert whole.model not in library.folders


def test_groups_that_are_finished_at_the_same_time_are_all_there(whole: ModelFolder, tmp_path: Path) -> None:
    for attempt in range(10):
        target = files.create(tmp_path / f"store{attempt}", whole.manifest)
        parts = [GroupDownload(target, group) for group in range(N_BLOCKS + 1)]
        for part in parts:
            part.begin()
            for ref in list(part.missing):
                part.put(ref, whole.read(ref))
        threads = [threading.Thread(target=part.finish) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert target.held == set(range(N_BLOCKS + 1))


def test_a_file_that_is_no_safetensors_spoils_its_own_group_only(whole: ModelFolder, tmp_path: Path) -> None:
    target = files.create(tmp_path / "store", whole.manifest)
    for group in (0, 1):
        copy(whole, target, group)
    (target.folder / "block-0000.safetensors").write_bytes(b"cut")
    library = Library(tmp_path / "store", {})
    assert library.folders[whole.model].held == {1}
    part = copy(whole, library.folders[whole.model], 0)
    assert not part.missing
    assert library.folders[whole.model].held == {0, 1}


def test_weights_that_changed_after_they_were_added_are_left_out(whole: ModelFolder, tmp_path: Path) -> None:
    Library(tmp_path / "store", {}).keep_manifest(whole.manifest, whole.folder)
    assert whole.model in Library(tmp_path / "store", {whole.model: whole.folder}).folders
    shard = whole.folder / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-9] ^= 1
    shard.write_bytes(data)
    library = Library(tmp_path / "store", {whole.model: whole.folder})
    assert whole.model not in library.folders
    library.look({})


def test_what_is_no_longer_listed_is_no_longer_offered(whole: ModelFolder, tmp_path: Path) -> None:
    library = Library(tmp_path / "store", {whole.model: whole.folder})
    library.look({})
    assert not library.folders
