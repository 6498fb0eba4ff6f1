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


def test_a_checkpoint_holds_all_groups_and_each_tensor_has_its_own(full_model: ModelFolder) -> None:
    assert full_model.held == set(range(N_BLOCKS + 1))
    by_name = dict(zip((e.name for e in full_model.manifest.entries), full_model.groups, strict=True))
    assert by_name["layers.2.w"] == by_name["layers.2.b"] == 2
    assert by_name["tokenizer.json"] == by_name["embed.weight"] == by_name["extra.9.weight"] == HEAD
    assert by_name[f"layers.{N_BLOCKS}.w"] is None, "a layer beyond the configured ones is nobody's"


def test_copied_groups_are_safetensors_with_the_same_bytes(full_model: ModelFolder, tmp_path: Path) -> None:
    target = files.create(tmp_path / "store", full_model.manifest)
    assert target.held == set()
    copy(full_model, target, 1)
    copy(full_model, target, HEAD)
    assert ModelFolder(target.folder, full_model.manifest).held == {1, HEAD} == target.held
    with (
        safe_open(target.folder / "block-0001.safetensors", "np") as ours,
        safe_open(full_model.folder / "model.safetensors", "np") as theirs,
    ):
        assert set(ours.keys()) == {"layers.1.w", "layers.1.b"}
        assert ours.get_tensor("layers.1.w").tobytes() == theirs.get_tensor("layers.1.w").tobytes()
    assert (target.folder / "tokenizer.json").read_text() == '{"a": 1}'
    with pytest.raises(Refused, match="is not here"):
        target.read((1 + next(i for i, g in enumerate(full_model.groups[1:]) if g == 0), 0))


def test_what_was_verified_before_a_crash_is_not_asked_for_again(full_model: ModelFolder, tmp_path: Path) -> None:
    target = files.create(tmp_path / "store", full_model.manifest)
    first = copy(full_model, target, 2, at_most=2)
    missing = set(first.missing)
    assert missing, "the part is not complete"
    second = GroupDownload(target, 2)
    second.begin()
    assert set(second.missing) == missing
    path = next(slot.part for slot in target.slots(2))
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"spoiled")
    spoiled = GroupDownload(target, 2)
    spoiled.begin()
    assert len(spoiled.missing) > len(missing), "what a crash left half written is not believed"


def test_other_bytes_are_refused_and_nothing_is_written(full_model: ModelFolder, tmp_path: Path) -> None:
    target = files.create(tmp_path / "store", full_model.manifest)
    part = GroupDownload(target, 0)
    part.begin()
    ref = next(iter(part.missing))
    missing = set(part.missing)
    with pytest.raises(IntegrityError, match="another sha256 than the manifest says"):
        part.put(ref, bytes(part.missing[ref]))
    assert set(part.missing) == missing


def test_two_processes_that_fetch_the_same_group_do_each_other_no_harm(full_model: ModelFolder, tmp_path: Path) -> None:
    target = files.create(tmp_path / "store", full_model.manifest)
    ours = GroupDownload(target, HEAD)
    theirs = GroupDownload(target, HEAD)
    ours.begin()
    theirs.begin()
    refs = list(ours.missing)
    for ref in refs[:-1]:
        ours.put(ref, full_model.read(ref))
    for ref in refs:
        theirs.put(ref, full_model.read(ref))
    theirs.finish()
    ours.put(refs[-1], full_model.read(refs[-1]))
    ours.finish()
    assert target.held == {HEAD}
    assert not target.damaged()


def test_a_full_disk_says_so_and_keeps_what_is_there(
    full_model: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = files.create(tmp_path / "store", full_model.manifest)
    part = copy(full_model, target, 0, at_most=1)
    ref = next(iter(part.missing))
    data = full_model.read(ref)

    def full(path: Path, flags: int = 0) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(files, "_open_file", full)
        with pytest.raises(ConfigError, match="No space left on device; what was verified is kept: make room"):
            part.put(ref, data)
    assert set(copy(full_model, target, 0, at_most=0).missing) == set(part.missing)


def test_a_symbolic_link_in_the_way_is_not_followed(full_model: ModelFolder, tmp_path: Path) -> None:
    target = files.create(tmp_path / "store", full_model.manifest)
    victim = tmp_path / "precious"
    victim.write_text("precious")
    next(slot.part for slot in target.slots(0)).symlink_to(victim)
    with pytest.raises(ConfigError, match="a symbolic link is in the way"):
        GroupDownload(target, 0).begin()
    assert victim.read_text() == "precious"


def test_what_changed_on_disk_is_not_given_away(full_model: ModelFolder) -> None:
    shard = full_model.folder / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-100_000] ^= 1
    shard.write_bytes(data)
    assert len(full_model.damaged()) == 1
    (name,) = full_model.damaged()
    index = next(i for i, e in enumerate(full_model.manifest.entries) if e.name == name)
    last = len(full_model.manifest.entries[index].chunks) - 1
    with pytest.raises(Refused, match="no longer what it was"):
        full_model.read((index, last))


@pytest.mark.parametrize("ref", [(10_000, 0), (0, 10_000)])
def test_chunks_that_do_not_exist_are_refused(full_model: ModelFolder, ref: tuple[int, int]) -> None:
    with pytest.raises(Refused, match=r"which .* does not have"):
        full_model.read(ref)


def test_the_least_recently_used_goes_first_and_never_what_is_in_use(full_model: ModelFolder, tmp_path: Path) -> None:
    root = tmp_path / "store"
    target = files.create(root, full_model.manifest)
    for group in range(N_BLOCKS):
        copy(full_model, target, group)
        os.utime(target.slots(group)[0].path, (group, group))
    library = Library(root, {}, limit_bytes=1)
    library.limit_bytes = library.used_bytes() + 1_000_000  # 1 MB is free
    model = target.model
    gone = library.make_room(6_000_000, {model: frozenset({0})})
    assert gone == [f"group 1 of {model[:12]}"]
    assert library.folders[model].held == {0, 2, 3}
    with pytest.raises(ConfigError, match=r"exceed the disk limit .* make room"):
        library.make_room(10**9, {model: frozenset({0, 2, 3})})


def test_folders_of_the_user_are_never_deleted(full_model: ModelFolder, tmp_path: Path) -> None:
    library = Library(tmp_path / "store", {full_model.model: full_model.folder})
    with pytest.raises(ConfigError, match="a folder of yours"):
        library.remove(full_model.model)
    assert library.folders[full_model.model].held == full_model.held


def test_a_folder_that_is_no_longer_what_was_added_is_left_out(full_model: ModelFolder, tmp_path: Path) -> None:
    other_model = make_model(tmp_path / "other", seed=9)
    library = Library(tmp_path / "store", {full_model.model: other_model})
    assert full_model.model not in library.folders


def test_groups_that_are_finished_at_the_same_time_are_all_there(full_model: ModelFolder, tmp_path: Path) -> None:
    for attempt in range(10):
        target = files.create(tmp_path / f"store{attempt}", full_model.manifest)
        parts = [GroupDownload(target, group) for group in range(N_BLOCKS + 1)]
        for part in parts:
            part.begin()
            for ref in list(part.missing):
                part.put(ref, full_model.read(ref))
        threads = [threading.Thread(target=part.finish) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert target.held == set(range(N_BLOCKS + 1))


def test_a_file_that_is_no_safetensors_spoils_its_own_group_only(full_model: ModelFolder, tmp_path: Path) -> None:
    target = files.create(tmp_path / "store", full_model.manifest)
    for group in (0, 1):
        copy(full_model, target, group)
    (target.folder / "block-0000.safetensors").write_bytes(b"cut")
    library = Library(tmp_path / "store", {})
    assert library.folders[full_model.model].held == {1}
    part = copy(full_model, library.folders[full_model.model], 0)
    assert not part.missing
    assert library.folders[full_model.model].held == {0, 1}


def test_weights_that_changed_after_they_were_added_are_left_out(full_model: ModelFolder, tmp_path: Path) -> None:
    Library(tmp_path / "store", {}).keep_manifest(full_model.manifest, full_model.folder)
    assert full_model.model in Library(tmp_path / "store", {full_model.model: full_model.folder}).folders
    shard = full_model.folder / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-9] ^= 1
    shard.write_bytes(data)
    library = Library(tmp_path / "store", {full_model.model: full_model.folder})
    assert full_model.model not in library.folders
    library.look({})


def test_what_is_no_longer_listed_is_no_longer_offered(full_model: ModelFolder, tmp_path: Path) -> None:
    library = Library(tmp_path / "store", {full_model.model: full_model.folder})
    library.look({})
    assert not library.folders
