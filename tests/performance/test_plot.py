import matplotlib.image
from matplotlib.figure import Figure

from flashtrain.performance.attention import Measurement, Problem
from flashtrain.performance.masks import Masks
from flashtrain.performance.plot import COLORS, save_plot
from flashtrain.performance.report import Conditions
from flashtrain.performance.timing import Timing


def test_more_names_than_colours_have_lines_of_their_own(tmp_path, monkeypatch):
    names = [f"variant_{number}" for number in range(len(COLORS))] + ["other.attention:attend"]
    problem = Problem("causal", 64, batch=2, head_dim=16, num_q_heads=4, num_kv_heads=4)
    found = [Measurement(problem, name, "forward", 10**9, Timing((1.0,)), None) for name in names]
    given = Conditions("a device", "bfloat16", 128, 3, False, Masks(10, 40, 0), None, "(versions)")
    figures = []
    save = Figure.savefig

    def keep(figure, path):
        figures.append(figure)
        save(figure, path)

    monkeypatch.setattr(Figure, "savefig", keep)
    save_plot(found, given, tmp_path / "bench.png")
    (figure,) = figures
    looks = [(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines]
    assert len(set(looks)) == len(looks) == len(names)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == names
    assert matplotlib.image.imread(tmp_path / "bench.png").size
