import pytest
import torch
from matplotlib.figure import Figure

from flashtrain.kernels.attention import Intervals, tiles
from flashtrain.performance.attention import Measurement, Problem
from flashtrain.performance.counters import Counters
from flashtrain.performance.devices import DEVICES
from flashtrain.performance.explanation import Case, Counted, Setting
from flashtrain.performance.io import VARIANTS, Launch, Shape, compulsory, predict
from flashtrain.performance.io_plot import save_plot
from flashtrain.performance.roofline import estimate, nominal
from flashtrain.performance.timing import Timing

H200, DTYPE, MASK = DEVICES["h200"], torch.bfloat16, Intervals.full()
LAUNCH, RATES = Launch(tiles("sm_90", 64, DTYPE), H200.sram_elements), nominal(H200, DTYPE)
LENGTHS = (1024, 2048)


def shape(length):
    return Shape(1, length, length, 2, 2, 64)


def case(variant, pass_name, length, seconds):
    work = predict(variant, pass_name, shape(length), MASK, DTYPE, LAUNCH)
    found = estimate(work, compulsory(pass_name, shape(length), DTYPE), H200, RATES)
    problem = Problem("full", length, batch=1, head_dim=64, num_q_heads=2, num_kv_heads=2)
    timing = Timing((seconds,)) if seconds else None
    measured = timing and Measurement(problem, variant, pass_name, work.flops, timing, None)
    return Case(variant, pass_name, length, work, found, work.flops, measured)


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """drawn(seconds, counted) -> the panels, where every case took so long, and DRAM moved so many bytes in some."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))

    def draw(seconds=None, counted=()):
        cases = [
            case(variant, pass_name, length, seconds)
            for length in LENGTHS
            for pass_name in ("forward", "backward")
            for variant in VARIANTS
        ]
        found = [Counted(cases[0].estimate, Counters(*which, moved, 0, 0)) for which, moved in counted]
        setting = Setting(H200, RATES, RATES, DTYPE, "full", shape(1024), MASK, LAUNCH)
        save_plot(cases, found, setting, tmp_path / "explain.png")
        return figures.pop().axes

    return draw


def crosses(axes):
    return [line.get_xydata().tolist() for line in axes.lines if line.get_marker() == "x" and line.get_xydata().size]


def names(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_prediction_has_no_crosses(drawn):
    moved, roofline, time = drawn()
    assert [crosses(axes) for axes in (moved, roofline, time)] == [[], [], []]
    assert names(moved) == [*VARIANTS, "from HBM, model", "asked for"]
    assert names(roofline) == [*VARIANTS, "forward, model", "backward, model"]
    assert time.get_title("left") == "Least time" and names(time) == [*VARIANTS, "least"]


def test_what_was_measured_is_crosses(drawn):
    _, roofline, time = drawn(seconds=0.5)
    assert crosses(time) == [[[length, 1.0] for length in LENGTHS]] * 3
    assert len(crosses(roofline)) == 6 and names(roofline)[-1] == names(time)[-1] == "measured"
    assert time.get_title("left") == "Time, least and measured"


def test_bytes_that_the_hardware_counted_are_crosses_where_it_counted_both_passes(drawn):
    both = [(("standard", "forward", 2048), 500), (("standard", "backward", 2048), 700)]
    moved, *_ = drawn(counted=[*both, (("flash_v2", "forward", 1024), 300)])
    assert crosses(moved) == [[[2048, 1200]]]
    assert names(moved)[-1] == "DRAM, counted"
