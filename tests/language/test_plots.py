import math

import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot as plt

from moe_jax.language.plots import MAX_RECORDS, plot_expert_load, plot_loss


def run_records(num_steps=40, num_layers=2, num_experts=4, every=10):
    """Records of a run as `read_metrics` returns them."""
    rng = np.random.default_rng(0)
    records = []
    for step in range(every, num_steps + 1, every):
        record = {"step": step, "kind": "train", "bits_per_byte": 2 + 6 / step, "loss": 1.0}
        if num_layers:
            load = rng.dirichlet(np.full(num_experts, 5.0), num_layers)
            record["load"] = load.tolist()
        records.append(record)
        records.append({"step": step, "kind": "eval", "bits_per_byte": 2.1 + 6 / step})
    return records


def read_png(path):
    """Pixels [height, width, 4] in [0, 1]."""
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    image = plt.imread(path)
    assert image.ndim == 3 and min(image.shape[:2]) > 200
    return image


def share_of_color(image, color):
    return np.mean(np.all(np.abs(image[..., :3] - np.array(color)) < 0.02, axis=-1))


@pytest.fixture(autouse=True)
def no_figure_stays_open():
    yield
    assert plt.get_fignums() == []


def test_loss_curve_is_drawn(tmp_path):
    plot_loss(run_records(), tmp_path / "loss.png", {"xz -9e": 2.09, "bzip2 -9": 2.15})
    image = read_png(tmp_path / "loss.png")
    # Blue for training, orange for held out.
    assert share_of_color(image, (31 / 255, 119 / 255, 180 / 255)) > 1e-4
    assert share_of_color(image, (255 / 255, 127 / 255, 14 / 255)) > 1e-4


def test_loss_axis_fits_what_follows_the_first_tenth(tmp_path, monkeypatch):
    monkeypatch.setattr(plt, "close", lambda figure: None)
    records = [{"step": 1, "kind": "train", "bits_per_byte": 8.0}]
    records += [{"step": s, "kind": "train", "bits_per_byte": 2.0} for s in range(10, 101, 10)]
    records += [{"step": 50, "kind": "eval", "bits_per_byte": 3.0}]
    plot_loss(records, tmp_path / "loss.png", {"xz": 1.0, "bzip2": 1.5, "lzma": 1.6, "gzip": 1.7})
    axes = plt.gcf().axes[0]
    assert axes.get_ylim() == pytest.approx((0.9, 3.1))
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == [
        *("training", "held out"),
        *("xz: 1.00", "bzip2: 1.50", "lzma: 1.60", "gzip: 1.70"),
    ]
    monkeypatch.undo()
    plt.close("all")


@pytest.mark.parametrize(
    "records",
    [
        [],
        run_records(10)[:1],
        run_records(10)[1:],
        [{"step": 5, "kind": "train"}, {"step": 5, "kind": "skipped", "bits_per_byte": math.nan}],
        [{"step": 5, "kind": "train", "bits_per_byte": None}],
        [{"step": 5, "kind": "train", "bits_per_byte": math.nan}],
        [*run_records(), {"step": 50, "kind": "train", "bits_per_byte": math.inf}],
    ],
    ids=["none", "one", "evaluation_only", "without", "null", "nan", "infinite"],
)
def test_loss_curve_of_an_unfinished_run_is_drawn(records, tmp_path):
    plot_loss(records, tmp_path / "loss.png")
    read_png(tmp_path / "loss.png")


@pytest.mark.parametrize("num_layers", [1, 2, 5, 9])
def test_expert_load_is_drawn_for_any_number_of_layers(num_layers, tmp_path):
    assert plot_expert_load(run_records(num_layers=num_layers), tmp_path / "load.png")
    read_png(tmp_path / "load.png")


def test_expert_load_of_one_record_is_drawn(tmp_path):
    assert plot_expert_load(run_records(10), tmp_path / "load.png")
    read_png(tmp_path / "load.png")


def test_run_without_sparse_layers_has_no_expert_load(tmp_path):
    assert not plot_expert_load(run_records(num_layers=0), tmp_path / "load.png")
    assert not plot_expert_load([], tmp_path / "load.png")
    assert not (tmp_path / "load.png").exists()


def test_load_that_is_not_a_number_is_grey(tmp_path):
    grey = (153 / 255,) * 3
    records = run_records(num_layers=1)
    plot_expert_load(records, tmp_path / "good.png")
    assert share_of_color(read_png(tmp_path / "good.png"), grey) < 1e-3
    records[2]["load"] = [[math.nan, None, 0.5, 0.5]]
    records[4]["load"] = None
    plot_expert_load(records, tmp_path / "bad.png")
    assert share_of_color(read_png(tmp_path / "bad.png"), grey) > 0.01


def drawn_panels(records, path, monkeypatch):
    """The steps at the edges and the loads of every panel that is shown."""
    monkeypatch.setattr(plt, "close", lambda figure: None)
    plot_expert_load(records, path)
    panels = [
        (axes.collections[0].get_coordinates()[0, :, 0], axes.collections[0].get_array())
        for axes in plt.gcf().axes
        if axes.get_visible() and axes.get_title()
    ]
    monkeypatch.undo()
    plt.close("all")
    return panels


def test_panels_show_load_over_mean_load_of_each_layer(tmp_path, monkeypatch):
    records = run_records(num_steps=30, num_layers=5)
    panels = drawn_panels(records, tmp_path / "load.png", monkeypatch)
    assert len(panels) == 5
    for layer, (edges, load) in enumerate(panels):
        np.testing.assert_array_equal(edges, [0, 10, 20, 30])
        expected = np.array([record["load"][layer] for record in records[::2]]).T * 4
        np.testing.assert_allclose(np.asarray(load).reshape(4, 3), expected)


def test_long_runs_are_drawn_as_means_over_neighbouring_records(tmp_path, monkeypatch):
    records = run_records(num_steps=4 * MAX_RECORDS, num_layers=1, num_experts=2, every=2)
    ((edges, load),) = drawn_panels(records, tmp_path / "load.png", monkeypatch)
    np.testing.assert_array_equal(edges, np.arange(0, 4 * MAX_RECORDS + 1, 4))
    every = np.array([record["load"][0] for record in records[::2]]).T * 2
    expected = every.reshape(2, MAX_RECORDS, 2).mean(axis=2)
    np.testing.assert_allclose(np.asarray(load).reshape(2, MAX_RECORDS), expected)


def test_noisy_training_is_drawn_as_window_means_over_the_pale_records(tmp_path, monkeypatch):
    monkeypatch.setattr(plt, "close", lambda figure: None)
    records = [
        {"step": step, "kind": "train", "bits_per_byte": 2.0 + step % 2} for step in range(1, 201)
    ]
    plot_loss(records, tmp_path / "loss.png")
    raw, means = plt.gcf().axes[0].lines
    monkeypatch.undo()
    plt.close("all")
    assert len(raw.get_xdata()) == 200 and raw.get_alpha() < 0.5 and means.get_label() == "training"
    # 40 windows of 5 steps: 1 to 5, of which three are odd, then 6 to 10, of which two are.
    np.testing.assert_allclose(means.get_xdata(), np.arange(3, 201, 5))
    np.testing.assert_allclose(means.get_ydata(), np.tile([2.6, 2.4], 20))


@pytest.mark.parametrize("draw", [plot_loss, plot_expert_load])
def test_figures_say_their_step(draw, tmp_path, monkeypatch):
    monkeypatch.setattr(plt, "close", lambda figure: None)
    draw(run_records(num_steps=30), tmp_path / "figure.png")
    texts = [text.get_text() for text in plt.gcf().findobj(matplotlib.text.Text)]
    monkeypatch.undo()
    plt.close("all")
    assert "at step 30" in texts
