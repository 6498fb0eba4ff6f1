"""Every setting is checked when it is read, and names what was expected; old names still count."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmd.config import Serve, load
from swarmd.errors import ConfigError

PEER = "12D3KooWMbixtMEkZk78g8eibf8t2qnuUP6uZyYEauXxoToQGhJM"


def written(folder: Path, text: str) -> Path:
    (folder / "config.toml").write_text(text)
    return folder


PEER = "12D3KooWDcjXRCVv1RS5euPvwYo7cJdrUyaY9JduQw58jGgVm3Ei"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('announce = "foo"', "expected an announce address such as /ip4/192.0.2.7/tcp/4117, not 'foo'"),
        ('listen = "/ip4/300.1.1.1/tcp/1"', "expected a listen address"),
        ('listen = "/ip6/127.0.0.1/tcp/1"', "expected a listen address"),
        ('listen = "/ip4/127.0.0.1/tcp/70000"', "expected a listen address"),
        ('listen = "/ip4/127.0.0.1/udp/1"', "expected a listen address"),
        ('announce = "/dns4/-bad-/tcp/1"', "expected an announce address"),
        (f'announce = "/ip4/1.2.3.4/tcp/1/p2p/{PEER[:-1]}"', "expected an announce address"),
        ('blocked_peers = "foo"', r"blocked_peers lists peer ids .* not 'foo'"),
        ("direct_port = 70000", "at most 65535"),
        ("threads = -1", "threads cannot be negative"),
        ('dtype = "float8"', "dtype is one of"),
        ('[gateway]\nhead = "int4"', "gateway.head is one of own, int8"),
        ('[gateway]\ndevice = "cuda:x"', "gateway.device is for example cpu or cuda:1"),
        ('team = "1:0"', "what each is worth, not '1:0'"),
        ('team = "one:two"', "team is auto, whole, or for example 1:1 or 1:2:6"),
        ('team_peers = "me"', "team_peers lists peer ids"),
        ('follow = "me"', "follow lists peer ids"),
        (
            f'team = "1:2:6"\nteam_peers = "{PEER}"',
            "1 team_peers are worth, as 1:1 does",
        ),
        (f'team_peers = "{PEER}"', "1 team_peers are worth"),
        (f'team = "whole"\nteam_peers = "{PEER}, {PEER}"', "each once, not 2 with doubles"),
        ('team = "1:2"\ndevice = "cuda"', "a team computes on processors"),
        ('team = "2"', "a team has two members at least, as 1:1 has"),
        ('team = "whole"', "team whole shares long prompts with team_peers: name them"),
        ('team = "1::2"', "team is auto, whole, or for example 1:1 or 1:2:6"),
        ('device = "cuda:x"', "device is for example cpu or cuda:1"),
        ('blocks = "4:2"', "START:END with START < END"),
        ('model = "a,b"\nblocks = "0:3"', r"cannot be those of 2 models"),
        ("tuning_share = 2.0", "a part of 1"),
        ("serve = 7", "serve takes a value of type bool"),
        ("serve = [7]", r"tables \[\[serve\]\]"),
        ('[[serve]]\nmodle = "a"', r"unknown setting 'modle' in \[\[serve\]\]"),
        ('[[serve]]\nquantize = "int2"', "quantize is one of"),
        ("[[serve]]\nthreads = -3", "cannot be negative"),
        ("\n".join(["[[serve]]"] * 17), "16 workers at most"),
        ("lisen = 3", "unknown setting 'lisen'"),
        ("[gateway]\nlisen = 3", r"unknown setting 'lisen' in \[gateway\]"),
        ('[gateway]\nnames = "a"', r"\[gateway.names\] has lines like"),
        ('[gateway.names]\n"gpt-5" = ["a"]', r"\[gateway.names\] has lines like"),
        ("listen = ", "config.toml"),
    ],
    ids=str,
)
def test_what_cannot_be_right_is_named(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load(written(tmp_path, text), {})


def test_names_that_programs_ask_for_stand_for_models(tmp_path: Path) -> None:
    text = '[gateway]\non = true\n[gateway.names]\n"gpt-5" = "smol"\n"*" = "big"\n'
    gateway = load(written(tmp_path, text), {}).gateway
    assert (gateway.on, gateway.names) == (True, {"gpt-5": "smol", "*": "big"})


def test_a_file_in_another_encoding_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes('model = "größer"'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.toml is not UTF-8: line 1 has the byte 0xf6; convert it first"):
        load(tmp_path, {})
    (tmp_path / "config.toml").write_bytes('model = "a"'.encode("utf-16"))
    with pytest.raises(ConfigError, match=r"config\.toml: it is UTF-16, expected UTF-8 text: convert it first: iconv"):
        load(tmp_path, {})


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(b'\xef\xbb\xbfmodel = "a"\r\n')
    assert load(tmp_path, {}).model == "a"


def test_a_link_that_leads_nowhere_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "config.toml").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"config\.toml cannot be read: No such file"):
        load(tmp_path, {})


def test_what_is_right_is_taken(tmp_path: Path) -> None:
    text = f"""
    announce = "/ip4/192.0.2.7/tcp/4117, /dns4/host.example/tcp/4117/p2p/{PEER}, /ip6/::1/tcp/1"
    blocked_peers = "{PEER}"
    """
    config = load(written(tmp_path, text), {})
    assert config.to_host() == (Serve(),)
    assert load(tmp_path, {}, serve=False).to_host() == ()


def test_several_models_get_a_worker_each_and_tables_say_more_of_each(tmp_path: Path) -> None:
    assert [s.model for s in load(tmp_path, {}, model="a,b").to_host()] == ["a", "b"]
    text = 'quantize = "int8"\n[[serve]]\nmodel = "a"\ndevice = "cuda:1"\n[[serve]]\nmodel = "b"\nquantize = "none"'
    config = load(written(tmp_path, text), {})
    assert config.to_host() == (
        Serve("a", quantize="int8", device="cuda:1"),
        Serve("b", quantize="none"),
    )
    assert [s.model for s in load(tmp_path, {}, model="typed").to_host()] == ["typed"], "what is typed counts"


def test_old_names_still_count_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load(written(tmp_path, "training_mib = 7"), {"SWARMD_TRAINING": "off"}, tuning_share=0.5)
    assert (config.tuning_mib, config.training_runs, config.tuning_share) == (7, "off", 0.5)
    assert "training_mib is called tuning_mib now" in caplog.text
    assert "training is called training_runs now" in caplog.text


def test_tables_take_what_the_environment_says_of_all_and_give_way_to_a_model_named_later(tmp_path: Path) -> None:
    written(tmp_path, '[[serve]]\nmodel = "a"\n[[serve]]\nmodel = "b"\ndtype = "float32"')
    hosted = load(tmp_path, {"SWARMD_DTYPE": "bfloat16", "SWARMD_THREADS": "2"}).to_host()
    assert [(s.model, s.dtype, s.threads) for s in hosted] == [("a", "bfloat16", 2), ("b", "float32", 2)]
    assert [s.model for s in load(tmp_path, {"SWARMD_MODEL": "c"}).to_host()] == ["c"]
    assert load(tmp_path, {}, serve=False).to_host() == ()
