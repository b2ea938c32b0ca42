import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from flashtrain.errors import UserError
from flashtrain.kernels.attention import Intervals
from flashtrain.performance.peers import Peer, TrainingPeer, versions_of


@pytest.fixture(autouse=True)
def module(monkeypatch):
    """The module `other.attention`, importable while a test runs."""
    module = ModuleType("other.attention")
    monkeypatch.setitem(sys.modules, "other.attention", module)
    return module


def test_a_peer_is_the_function_that_its_name_says(module):
    module.attend = lambda q, k, v, causal: q
    peer = Peer.named("other.attention:attend")
    assert peer.name == "other.attention:attend" and peer.function is module.attend


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("attend", "peers has attend; write MODULE:FUNCTION, as in flash_attn_interface:flash_attn_func"),
        ("other.attention:", "peers has other.attention:; write MODULE:FUNCTION"),
        (":attend", "peers has :attend; write MODULE:FUNCTION"),
        (
            "no_such_module:attend",
            "peers has no_such_module:attend, and no_such_module cannot be imported "
            "(ModuleNotFoundError(\"No module named 'no_such_module'\")); install the package that holds it, put its "
            "folder on PYTHONPATH, or leave it out",
        ),
        (".attention:attend", "peers has .attention:attend, and .attention cannot be imported (TypeError("),
        (
            "other.attention:atend",
            "peers has other.attention:atend, and other.attention has no function atend; name one of its own",
        ),
        ("other.attention:number", "peers has other.attention:number, and other.attention has no function number"),
    ],
)
def test_what_names_no_function_is_refused_in_one_sentence(module, name, sentence):
    module.number = 3
    with pytest.raises(UserError) as mistake:
        Peer.named(name)
    assert str(mistake.value).startswith(sentence)


def test_a_library_that_does_not_load_is_told_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "broken_attention.py").write_text("raise OSError('undefined symbol\\nin a library')")
    (tmp_path / "exiting_attention.py").write_text("raise SystemExit(3)")
    (tmp_path / "lazy_attention.py").write_text("def __getattr__(name):\n    raise ImportError('no GPU')")
    monkeypatch.syspath_prepend(tmp_path)
    for name, error in (("exiting", r"SystemExit\(3\)"), ("lazy", r"ImportError\('no GPU'\)")):
        with pytest.raises(UserError, match=rf"{name}_attention cannot be imported \({error}\); install the package"):
            Peer.named(f"{name}_attention:attend")
    with pytest.raises(UserError, match=r"broken_attention cannot be imported \(OSError\('undefined symbol\\nin a"):
        Peer.named("broken_attention:attend")


@pytest.mark.parametrize(
    ("intervals", "reason"),
    [
        (Intervals.full(), None),
        (Intervals.causal(), None),
        (Intervals.window(9, 0), "takes the full and the causal mask, not window(9, 0)"),
        (
            Intervals.causal().in_documents(torch.tensor([[0, 0, 1]])),
            "takes the full and the causal mask, not documents, chunks or a prefix",
        ),
    ],
    ids=["full", "causal", "window", "documents"],
)
def test_it_takes_the_full_and_the_causal_mask(intervals, reason):
    assert Peer("other.attention:attend", max).refusal(intervals) == reason


@pytest.mark.parametrize("wrap", [lambda out: out, lambda out: (out, None), lambda out: [out]])
def test_out_is_what_the_function_returns_or_the_first_of_it(wrap):
    asked = []

    def attend(q, k, v, *, causal):
        asked.append(causal)
        return wrap(q)

    q = torch.zeros(1, 2, 3, 4)
    assert Peer("other.attention:attend", attend).attend(q, q, q, Intervals.causal()) is q
    assert Peer("other.attention:attend", attend).attend(q, q, q, Intervals.full()) is q
    assert asked == [True, False]


@pytest.mark.parametrize(
    ("result", "what"),
    [(None, "NoneType"), ((), "an empty tuple"), ([], "an empty list"), ((None,), "NoneType")],
    ids=str,
)
def test_what_is_no_tensor_is_no_out(result, what):
    with pytest.raises(TypeError, match=f"returned {what}, not out or a tuple that begins with it"):
        Peer("other.attention:attend", lambda q, k, v, causal: result).attend(*[torch.zeros(1)] * 3, Intervals.full())


def test_a_function_that_exits_raises():
    def attend(q, k, v, causal):
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match=r"raised SystemExit\(3\)"):
        Peer("other.attention:attend", attend).attend(*[torch.zeros(1)] * 3, Intervals.full())


def test_the_versions_are_of_the_distributions_that_hold_the_module():
    assert versions_of("torch.nn.functional:relu")[0].startswith("torch 2.")
    assert versions_of("other.attention:attend") == []


def test_the_version_of_a_plain_file_is_what_is_in_it(tmp_path, monkeypatch):
    (tmp_path / "plain_attention.py").write_bytes(b"abc = print\n")
    monkeypatch.syspath_prepend(tmp_path)
    for peer in (Peer, TrainingPeer):
        assert peer.named("plain_attention:abc").function is print
    assert versions_of("plain_attention:abc") == ["plain_attention.py sha256 f9160c5eaa48"]
    (tmp_path / "plain_attention.py").unlink()
    assert versions_of("plain_attention:abc") == []


def test_a_peer_of_training_is_asked_for_a_length_and_tokens(module):
    taken = []
    module.gpt = lambda sequence_length, tokens: (lambda: taken.append((sequence_length, tokens)), tokens - 1)
    step, tokens = TrainingPeer.named("other.attention:gpt").build(64, 256)
    step()
    assert tokens == 255 and taken == [(64, 256)]


@pytest.mark.parametrize("tokens", [128, np.int64(128), np.uint8(128), torch.tensor(128)], ids=repr)
def test_the_tokens_of_a_step_may_be_any_integer(tokens):
    _, taken = TrainingPeer("other.attention:gpt", lambda *_: (print, tokens)).build(64, 256)
    assert type(taken) is int and taken == 128


@pytest.mark.parametrize("tokens", [0, -1, 2.0, True, np.True_, np.float32(2), "256", None], ids=repr)
def test_other_tokens_are_refused_in_one_sentence(tokens):
    with pytest.raises(TypeError) as refusal:
        TrainingPeer("other.attention:gpt", lambda *_: (print, tokens)).build(64, 256)
    assert str(refusal.value) == (
        f"returned {tokens!r} as the tokens of a step; return an integer above 0, the rows times their length"
    )


@pytest.mark.parametrize(
    ("result", "what"),
    [
        (None, "NoneType"),
        (print, "builtin_function_or_method"),
        ((print,), "(builtin_function_or_method)"),
        ((3, 4), "(int, int)"),
        ([print, 4, 5], "(builtin_function_or_method, int, int)"),
    ],
    ids=str,
)
def test_what_is_no_step_with_its_tokens_is_refused_in_one_sentence(result, what):
    with pytest.raises(TypeError) as refusal:
        TrainingPeer("other.attention:gpt", lambda length, tokens: result).build(64, 256)
    assert str(refusal.value) == (
        f"returned {what}, not (step, tokens); return a function that takes one step, and how many tokens that has"
    )


def test_a_peer_of_training_that_exits_raises():
    def exits(*_):
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match=r"raised SystemExit\(3\)"):
        TrainingPeer("other.attention:gpt", exits).build(64, 256)
    step, _ = TrainingPeer("other.attention:gpt", lambda length, tokens: (exits, tokens)).build(64, 256)
    with pytest.raises(RuntimeError, match=r"raised SystemExit\(3\)"):
        step()
