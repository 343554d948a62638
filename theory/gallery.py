"""Draws every figure of the theory package with one command.

python -m theory.gallery --output=theory/gallery

The constructions are built and measured anew, in one to two minutes; the learned experiments are
drawn from their recorded results, benchmarks/results/theory_*.json.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
from absl import app, flags

matplotlib.use("agg")

from matplotlib import pyplot as plt  # noqa: E402  (after the backend is chosen)

from moe_jax.training.rates import fit_rate  # noqa: E402
from theory.atlas import (  # noqa: E402
    Atlas,
    chart_coordinates,
    nearest,
    regular_centers,
    voronoi_atlas,
)
from theory.capacity import degrees_of_freedom  # noqa: E402
from theory.construct import Target, chart_moe, reference_interpolant  # noqa: E402
from theory.datadriven import fit_charts, node_features  # noqa: E402
from theory.manifolds import Manifold, circle, draw_uniform, embed_isometric, sphere  # noqa: E402
from theory.network import apply_network  # noqa: E402
from theory.partition import bumps, misassigned, partition_of_unity  # noqa: E402
from theory.paths import path_stats  # noqa: E402
from theory.plots import draw_experiment, draw_maps  # noqa: E402
from theory.product_grid import (  # noqa: E402
    one_layer_floor,
    one_layer_gate,
    product_grid,
    product_grid_moe,
)
from theory.rings import affine_gate, quadratic_gate, two_layer_gate, with_square  # noqa: E402
from theory.targets import circle_directions, kinks, ring_index, waves  # noqa: E402

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
RADII = (0.35, 0.65, 0.95)
KEY = jax.random.key(0)


def draw_gallery(folder: Path, results: Path = RESULTS) -> list[Path]:
    """Draws all figures into `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, draw in (
        ("error_width", draw_error_width),
        ("partitions", draw_partitions),
        ("paths", draw_paths),
        ("floor", draw_floor),
        ("routing", draw_routing),
        ("datadriven", draw_datadriven),
    ):
        drawn.append(folder / f"{name}.png")
        draw(drawn[-1])
    for path in sorted(results.glob("theory_*.json")):
        record, name = json.loads(path.read_text()), path.stem.removeprefix("theory_")
        drawn.append(folder / f"{name}.png")
        draw_experiment(record, drawn[-1])
        if any("map" in run for run in record["runs"].values()):
            drawn.append(folder / f"{name}_trained.png")
            draw_maps(record, drawn[-1])
    return drawn


def draw_error_width(path: Path) -> None:
    """Sup error against the experts' width: the slope is set by d and smoothness, not by D."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    dims = (2, 10, 100, 1000)
    colors = plt.get_cmap("viridis")(np.linspace(0.0, 0.85, len(dims)))
    angles = np.linspace(0.0, 2 * np.pi, 4001)[:-1, None]
    segments = (8, 16, 32, 64, 128, 256)
    for i, dim in enumerate(dims):
        manifold = embed_isometric(jax.random.key(1), circle(), dim)
        atlas = voronoi_atlas(KEY, manifold, center_params=regular_centers("circle", 4))
        _draw_rate(
            left, atlas, waves(), segments, angles, f"circle, D = {dim}",
            color=colors[i], marker="os^D"[i], markersize=10 - 2 * i,
        )  # fmt: skip
    spheres = embed_isometric(jax.random.key(2), sphere(), 10)
    atlas = voronoi_atlas(KEY, spheres, center_params=regular_centers("icosahedron"))
    params = spheres.sample_params(jax.random.key(3), 4000)
    _draw_rate(
        left, atlas, waves(3.0, 2.0), (8, 12, 16, 24, 32), params, "sphere, D = 10",
        color="C3", marker="P",
    )  # fmt: skip
    atlas = voronoi_atlas(KEY, circle(), center_params=regular_centers("circle", 4))
    u = circle_directions(24)
    cusps = np.arctan2(u[1], u[0])[:, None] + np.arccos(0.3) * np.array([[-1.0, 1.0]])
    params = np.concatenate([angles, cusps.reshape(-1, 1)])
    for name, target, theory, color in (
        ("smooth", waves(), -2.0, "C0"),
        ("kink, Lipschitz", kinks(u, 1.0), -1.0, "C1"),
        ("cusp, Hölder 1/2", kinks(u, 0.5), -0.5, "C2"),
    ):
        _draw_rate(right, atlas, target, segments, params, name, theory=theory, color=color)
    left.set_title("smooth targets: the same rate in every dimension D", fontsize=10)
    right.set_title("circle: the rate is that of the target's smoothness", fontsize=10)
    for axes in (left, right):
        axes.set_xlabel("width of an expert, m (circle) or number of nodes, n² (sphere)")
        axes.set_ylabel("largest error")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.grid(alpha=0.3, which="both", linewidth=0.5)
        axes.legend(fontsize=8, loc="lower left")
    left.set_ylim(bottom=1e-5)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_rate(
    axes: Any,
    atlas: Atlas,
    target: Target,
    segments: Sequence[int],
    params: np.ndarray,
    name: str,
    *,
    theory: float | None = None,
    marker: str = "o",
    **style: Any,
) -> None:
    """Errors of the interpolant that the layers equal to 1e-12, and the line of theory."""
    x, y = atlas.manifold.embed(params), target(atlas.manifold.native(params))
    chart = nearest(x, atlas.centers)
    errors = []
    for num in segments:
        build = chart_moe(KEY, atlas, target, num)
        errors.append(np.abs(reference_interpolant(build, x, chart) - y).max())
    sizes = np.array(segments, float) ** atlas.dim
    fit = fit_rate(sizes, np.array(errors))
    slope = -2.0 / atlas.dim if theory is None else theory
    label = f"{name}: slope {fit.slope:.2f} ± {fit.half_width:.2f} (theory {slope:g})"
    axes.plot(sizes, errors, marker=marker, linestyle="none", label=label, **style)
    line = errors[-1] * (sizes / sizes[-1]) ** slope
    axes.plot(sizes, line, color=style.get("color"), linewidth=1, alpha=0.8)


def draw_partitions(path: Path) -> None:
    """The cells that three classes of constructed gates carve out of a disc with rings."""
    side = np.linspace(-1.0, 1.0, 301) * (1 - 1e-9)
    x = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    truth = ring_index(x, RADII)
    cases = [
        ("quadratic gate, 4 experts", quadratic_gate(RADII), with_square(x)),
        ("two-layer gate, 2 x 4 neurons, 4 experts", two_layer_gate(RADII, 4), x),
        ("two-layer gate, 2 x 16 neurons, 4 experts", two_layer_gate(RADII, 16), x),
        ("affine gate, 13 experts", affine_gate(RADII, 4), x),
        ("affine gate, 25 experts", affine_gate(RADII, 8), x),
        ("affine gate, 97 experts", affine_gate(RADII, 32), x),
    ]
    figure, grid = plt.subplots(2, 3, figsize=(11, 7.6), layout="constrained")
    for axes, (name, network, inputs) in zip(grid.flat, cases, strict=True):
        answer = apply_network(network, inputs, implementation="dense")
        level = answer.y[:, 0].round().reshape(301, 301)
        wrong = np.mean(np.abs(answer.y[:, 0] - truth) > 1e-9)
        cell = answer.selection[:, -1].reshape(301, 301)
        box = (-1, 1, -1, 1)
        style = {"origin": "lower", "extent": box, "interpolation": "nearest"}
        axes.imshow(level, cmap="Pastel1", vmin=0, vmax=8, **style)
        edge = np.zeros(cell.shape)
        edge[:-1] = cell[:-1] != cell[1:]
        edge[:, :-1] = np.maximum(edge[:, :-1], cell[:, :-1] != cell[:, 1:])
        axes.imshow(np.ma.masked_equal(edge, 0), cmap="gray", alpha=0.75, **style)
        turn = np.linspace(0, 2 * np.pi, 200)
        for radius in RADII:
            axes.plot(radius * np.cos(turn), radius * np.sin(turn), "C3--", linewidth=0.9)
        axes.set_title(f"{name}\n{100 * wrong:.2g}% of the square misrouted", fontsize=10)
        axes.set_xticks((-1, 0, 1))
        axes.set_yticks((-1, 0, 1))
    figure.suptitle(
        "grey: borders between experts; colours: what they answer; dashed red: the target's jumps",
        fontsize=10,
    )
    figure.savefig(path, dpi=100)
    plt.close(figure)


def draw_paths(path: Path) -> None:
    """Distinct paths of the constructed deep mixture against the points looked at."""
    figure, axes = plt.subplots(figsize=(7, 4.6), layout="constrained")
    for i, (num_cells, num_layers) in enumerate(((3, 2), (3, 6), (4, 5), (8, 4))):
        network = product_grid_moe(product_grid(KEY, num_cells, num_layers))
        x = draw_uniform(jax.random.key(1), (2**15, num_layers), 0.0, float(num_cells))
        chosen = apply_network(network, x, implementation="dense").selection
        counts = 2 ** np.arange(2, 16)
        stats = [path_stats(chosen[:count], num_cells) for count in counts]
        pieces = num_cells**num_layers
        label = (
            f"E = {num_cells}, L = {num_layers}: {num_cells * num_layers} experts, {pieces} pieces"
        )
        axes.plot(counts, [s.num_paths for s in stats], color=f"C{i}", marker="o", label=label)
        axes.plot(counts, [s.chao1 for s in stats], color=f"C{i}", linestyle=":", linewidth=1.2)
        axes.axhline(pieces, color=f"C{i}", linewidth=0.7, alpha=0.6)
    axes.plot([], [], color="0.3", linestyle=":", label="Chao's estimate of all paths in use")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("points looked at")
    axes.set_ylabel("distinct paths seen (lines: all E^L)")
    axes.grid(alpha=0.3, which="both", linewidth=0.5)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_floor(path: Path) -> None:
    """The sup error that one layer behind random affine gates cannot go below, and exact gates."""
    target = product_grid(KEY, 3, 2)
    side = (np.arange(60) + 0.5) / 20
    x = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    rng = np.random.default_rng(0)
    numbers = np.arange(1, 13)
    floors = []
    for num in numbers:
        kernels = [rng.normal(size=(3, num)) * [[3.0], [1.0], [1.0]] for _ in range(60)]
        floors.append([one_layer_floor(kernel, target, x) for kernel in kernels])
    exact = one_layer_gate(3, 2)
    aligned = [one_layer_floor(exact[:, :num], target, x) for num in numbers if num <= 9]
    figure, axes = plt.subplots(figsize=(7, 4.4), layout="constrained")
    least = np.min(floors, axis=1)
    axes.plot(
        numbers, least, "s", color="C0", markersize=8, label="least of 60 random affine gates"
    )
    axes.plot(numbers[:9], aligned, "o-", color="C3", label="the exact gate's first N experts")
    axes.axhline(
        target.jumps.min() / 2, color="0.3", linestyle="--",
        label="half the least jump: proven for N < 9",
    )  # fmt: skip
    axes.axvline(9, color="0.3", linewidth=0.8, linestyle=":")
    axes.set_ylim(bottom=-0.02)
    axes.set_xticks(numbers)
    axes.set_xlabel("experts N of the one layer (9 squares with jumps)")
    axes.set_ylabel("certified floor of the largest error")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_routing(path: Path) -> None:
    """Neurons that a fitted partition of unity takes, to route and to be within 1 / (2 E)."""
    widths = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
    figure, axes = plt.subplots(figsize=(7.6, 5.4), layout="constrained")
    cases = (
        ("circle", circle(), [("circle", num) for num in (4, 8, 16, 32)], "C0"),
        (
            "sphere",
            sphere(),
            [("octahedron", 0), ("icosahedron", 0), ("fibonacci", 24), ("fibonacci", 48)],
            "C1",
        ),
    )
    for name, manifold, centers, color in cases:
        atlases = [
            voronoi_atlas(KEY, manifold, center_params=regular_centers(*each), num_sample=5000)
            for each in centers
        ]
        needs = np.array([_needed_widths(manifold, atlas, widths) for atlas in atlases], float)
        counts = [atlas.num_charts for atlas in atlases]
        for column, marker, text in (
            (0, "o", "no point of 4000 misassigned"),
            (1, "^", "sup error below 1 / (2 E)"),
        ):
            axes.plot(
                counts, needs[:, column], marker=marker, color=color, linewidth=1,
                markerfacecolor=color if marker == "o" else "none", label=f"{name}: {text}",
            )  # fmt: skip
    line = np.array([4.0, 48.0])
    axes.plot(line, 16 * line, color="0.3", linewidth=1, linestyle="--", label="16 E")
    axes.plot(line, 2 * line**2, color="0.3", linewidth=1, linestyle=":", label="2 E²")
    axes.axhline(2 * widths[-1], color="0.6", linewidth=0.7)
    axes.text(4, 2 * widths[-1] * 1.05, f"not reached with {widths[-1]}", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks([4, 8, 16, 32, 48], ["4", "8", "16", "32", "48"])
    axes.set_xlabel("charts E")
    axes.set_ylabel("neurons of the fitted partition of unity")
    axes.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _needed_widths(manifold: Manifold, atlas: Atlas, widths: Sequence[int]) -> tuple[int, int]:
    """Least of the widths that misassigns nothing, and that is close; twice the largest if none.

    The worse of two draws of features.
    """
    x = manifold.embed(manifold.sample_params(jax.random.key(7), 4000))
    routes, is_close = [], []
    for width in widths:
        draws = [
            partition_of_unity(jax.random.key(seed), atlas, width, num_sample=3000)
            for seed in (0, 1)
        ]
        astray, gap = 0.0, 0.0
        for partition in draws:
            rho = partition(x)
            chosen = np.argmax(rho, axis=1)
            astray += misassigned(x, chosen, atlas.centers, partition.radius)
            gap = max(gap, float(np.abs(rho - bumps(x, atlas.centers, partition.radius)).max()))
        routes.append(astray == 0)
        is_close.append(gap < 0.5 / atlas.num_charts)
    none = 2 * widths[-1]
    found = [
        next((w for w, is_so in zip(widths, each, strict=True) if is_so), none)
        for each in (routes, is_close)
    ]
    return found[0], found[1]


def draw_datadriven(path: Path) -> None:
    """Error of the data-driven mixture against the mesh, and what the training data say of it."""
    manifold = embed_isometric(jax.random.key(2), sphere(), 10)
    target, segments = waves(3.0, 2.0), (3, 4, 6, 8, 10, 12, 16)

    def observed(key: int, num: int) -> tuple[np.ndarray, np.ndarray]:
        params = manifold.sample_params(jax.random.key(key), num)
        return manifold.embed(params), target(manifold.native(params))

    x, clean = observed(0, 8000)
    fresh, truth = observed(9, 4000)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for i, noise in enumerate((0.0, 0.1)):
        y = clean + noise * np.random.default_rng(0).normal(size=clean.shape)
        rows = []
        for num in segments:
            build = fit_charts(KEY, x, y, dim=2, num_charts=16, num_segments=num)
            charts = build.atlas
            chart = nearest(x, charts.centers)
            extent = (charts.high - charts.low)[chart]
            mesh = (chart_coordinates(charts, x, chart) - charts.low[chart]) / extent * num
            freedom = sum(
                degrees_of_freedom(node_features(mesh[chart == e], num), 1e-3) for e in range(16)
            )
            residual = reference_interpolant(build, x, chart) - y
            crossed = np.mean(residual**2) / (1 - freedom / len(x)) ** 2
            gap = np.abs(
                reference_interpolant(build, fresh, nearest(fresh, charts.centers)) - truth
            )
            rows.append((np.sqrt(np.mean(gap**2)), gap.max(), np.sqrt(crossed), freedom))
        rmse, sup, crossed, freedom = np.array(rows).T
        name = f"noise {noise:g}"
        left.plot(segments, rmse, "o-", color=f"C{i}", label=f"{name}: root mean square error")
        left.plot(segments, sup, "^:", color=f"C{i}", label=f"{name}: largest error")
        right.plot(
            segments, crossed, "s-", color=f"C{i}", label=f"{name}: generalised cross-validation"
        )
        best = segments[int(np.argmin(rmse))], segments[int(np.argmin(crossed))]
        left.axvline(best[0], color=f"C{i}", linewidth=0.7)
        right.axvline(best[1], color=f"C{i}", linewidth=0.7)
    twin = right.twinx()
    twin.plot(segments, freedom / len(x), "x--", color="0.3", label="degrees of freedom a point")
    twin.set_ylabel("degrees of freedom / points")
    left.set_title("on fresh points, without noise (line: least)", fontsize=10)
    right.set_title("from the training data alone (line: least)", fontsize=10)
    left.set_ylabel("error")
    right.set_ylabel("predicted error of an observation")
    for axes in (left, right):
        axes.set_yscale("log")
        axes.set_xticks(segments)
        axes.set_xlabel("mesh intervals n across a chart, 16 charts, 8000 points of the sphere")
        axes.grid(alpha=0.3, which="both", linewidth=0.5)
    handles: list[Any] = []
    labels: list[str] = []
    for axes in (left, right, twin):
        found = axes.get_legend_handles_labels()
        handles += found[0]
        labels += found[1]
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)
    plt.close(figure)


_OUTPUT = flags.DEFINE_string(
    "output", "theory/gallery", "Folder of the figures.", allow_override=True
)


def _main(argv: Sequence[str]) -> None:
    del argv
    for path in draw_gallery(Path(_OUTPUT.value)):
        print(path)


if __name__ == "__main__":
    app.run(_main)
